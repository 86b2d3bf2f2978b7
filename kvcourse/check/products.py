"""How many products an answer makes."""

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "mul"}  # what others are made of
WHOLE = {  # under torch.inference_mode these are not taken apart
    *("matmul", "linear", "einsum", "inner", "tensordot", "outer", "chain_matmul"),
    *("linalg_matmul", "linalg_multi_dot", "linalg_vecdot"),
}


class Counting(TorchDispatchMode):
    """Counts the products that PyTorch makes inside a `with` block, broadcast ones too; those of NumPy are not seen."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation.overloadpacket.__name__ in PRODUCTS | WHOLE
        return operation(*args, **(kwargs or {}))
