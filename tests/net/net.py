"""The net: names, flags, files, formats and run ids that stay as they are while the library is rewritten inside.

No number is recorded: its last bits are the processor's. Values are compared within one process, or with a formula in
float64 (`tests/helpers/reference_schemes.py`).
"""

from collections.abc import Callable

import net_parts

PARTS: dict[str, Callable[[], net_parts.Json]] = {
    "run_ids": net_parts.run_ids,
    "help": net_parts.command_help,
    "public_names": net_parts.public_names,
    "written_run": net_parts.written_run,
    "architectures": net_parts.architectures,
    "norms": net_parts.norm_tensors,
    "schemes": net_parts.scheme_tensors,
}
WORDED = {"help"}  # texts that depend on the environment
