"""normlab: what normalization does to a deep transformer, layer by layer.

`__init__.pyi` lists the public names. Each is imported at first use, so that `import normlab` stays cheap.
"""

import importlib.util

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# This distribution includes it, but uninstalling normlab-kernels, which owns the same files, removes it.
if getattr(importlib.util.find_spec("normlab_kernels"), "origin", None) is None:
    raise ModuleNotFoundError(
        "normlab's own copy of normlab_kernels is gone (uninstalling normlab-kernels removes it): "
        "install normlab again with pip's --force-reinstall --no-deps",
        name="normlab_kernels",
    )
