"""A second device where there is one: tensors that say they are elsewhere, and refuse to meet those that are here."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")  # the only one that a tensor can be moved to without having it


class Elsewhere(torch.Tensor):
    """A tensor whose values are in `here`, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_meta = False  # it has values

    @staticmethod
    def __new__(cls, here):
        new = cls._make_wrapper_subclass(cls, here.size(), here.stride(), dtype=here.dtype, device=ELSEWHERE)
        new.here = here.detach()
        return new

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def tolist(self):
        return self.here.tolist()

    def data_ptr(self):
        return self.here.data_ptr()


def computed(function, args, kwargs):
    """What a function of tensors on one device, or one that moves them, returns, on its device."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    is_elsewhere = any(isinstance(x, Elsewhere) for x in tensors)
    if is_elsewhere and "_to_copy" not in str(function):
        others = [x for x in tensors if not isinstance(x, Elsewhere) and x.ndim]
        assert not others, f"{function} of tensors on two devices"
    if kwargs.get("device") is not None:
        is_elsewhere, kwargs = torch.device(kwargs["device"]) == ELSEWHERE, kwargs | {"device": "cpu"}
    args, kwargs = tree_map(lambda x: x.here if isinstance(x, Elsewhere) else x, (args, kwargs))

    def placed(x):
        if not isinstance(x, torch.Tensor) or not is_elsewhere:
            return x
        return next((one for one in tensors if isinstance(one, Elsewhere) and one.here is x), Elsewhere(x))

    return tree_map(placed, function(*args, **kwargs))


class TwoDevices(TorchDispatchMode):
    """While active, tensors can be moved to `ELSEWHERE` and back."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


def move(block: nn.Module) -> None:
    """Have a block compute elsewhere, and take what it is given there itself, as accelerate's hooks do."""
    forward = block.forward
    for module in block.modules():
        for name, weight in module._parameters.items():
            module._parameters[name] = nn.Parameter(Elsewhere(weight.detach()), requires_grad=False)
    block.forward = lambda x: forward(x.to(ELSEWHERE))
