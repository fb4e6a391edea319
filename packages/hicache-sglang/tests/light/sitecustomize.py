"""Found by Python through PYTHONPATH: makes ``sglang.srt`` importable without ``sglang/__init__.py``.

For programs of ours that import a class of SGLang's in several processes, such as ``hicache check``.
"""

import sgl_release
import stand_ins  # noqa: F401 - importing it is all

sgl_release.prepare()
