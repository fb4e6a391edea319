"""What the default environment needs to pass its scripts on to the others.

Its scripts start hatch again, in the environment that holds what they need. That
has to work wherever hatch came from, on PATH or not, so its own command line is
put into HATCH_SELF. And an environment of type "system" keeps a marker in a
folder that hatch 1.18 expects but does not make.
"""

import sys

import click
from hatch.cli.application import Application
from hatch.env.collectors.plugin.interface import EnvironmentCollectorInterface


class Dispatch(EnvironmentCollectorInterface):
    """Adds HATCH_SELF to the variables of the default environment."""

    def finalize_config(self, config: dict[str, dict]) -> None:
        variables = config["default"].setdefault("env-vars", {})
        variables["HATCH_SELF"] = f'"{sys.executable}" -m hatch'

        app = click.get_current_context().find_object(Application)
        app.get_env_directory("system").mkdir(parents=True, exist_ok=True)
