"""Sizes on the command line: "16kib", "1.5GiB" or a number, as in backends' options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hicache_core.options import parse_size

if TYPE_CHECKING:  # generic since click 8.2, for type checkers alone
    _IntType = click.ParamType[int]
    _ListType = click.ParamType[list[int]]
else:
    _IntType = _ListType = click.ParamType


class SizeType(_IntType):
    """A number of bytes, 1 or more."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = value.strip() if isinstance(value, str) else value
        try:
            nbytes = parse_size(text)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if nbytes < 1:
            self.fail(f"{value!r} is not a size of at least 1 byte", param, ctx)
        return nbytes


class SizeListType(_ListType):
    """Sizes separated by commas."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        return [SIZE.convert(part, param, ctx) for part in str(value).split(",")]


SIZE = SizeType()
SIZES = SizeListType()
