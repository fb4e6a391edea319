"""Found by Python through PYTHONPATH at its start: lets a whole SGLang start without a GPU."""

import stand_ins  # noqa: F401 - importing it is all
