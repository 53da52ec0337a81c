"""What a backend does for the models of one kind of processor, when a decoder is loaded.

It replaces three kinds of parts, each by a seam of its own:

* **decoder layers**: :meth:`Backend.stack_for` gives a :class:`~fsd_infer.targets.stack.Stack` for families it knows;
* **linear layers and embeddings**: :meth:`Backend.prepare` turns them into ones that read packed weights, which answer
  the questions of :mod:`fsd_infer.targets.weights` themselves;
* **functions of tensors**: importing the backend registers its kernels with :mod:`fsd_core.functional`.

Everything that it does not know runs transformers' modules and plain torch. This class replaces nothing, and is the
backend of all devices that have none of their own.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from fsd_infer.targets.stack import Stack, StackOwner


class Backend:
    """Plain torch.

    Attributes:
        name: for records and messages.
        records: whether forwards and rounds are recorded as graphs unless a caller says otherwise.
    """

    name = "torch"
    records = False

    def describe(self) -> str | None:
        """Return which kernels run here: "amx", "avx512" …; None for plain torch.

        Raises:
            KernelsError: the kernels that a setting asks for cannot run here.
        """
        return None

    def report(self) -> tuple[str | None, str]:
        """Return :meth:`describe` and why. A wrong setting is not an error here: it becomes the reason."""
        if type(self) is Backend:
            return None, "this device has no backend of its own"
        return self.describe(), f"backend {self.name!r} says no more"

    def reads_blocks(self, ggml_type: int, rows: int, columns: int) -> bool:
        """Return whether a weight [rows, columns] may stay in the blocks of a GGUF file, of that ggml type.

        Loaders then leave a :class:`fsd_infer.targets.weights.QuantizedWeight` on the layer, and :meth:`prepare` must
        follow before the first forward.
        """
        return False

    def prepare(self, model: nn.Module, release: bool = False, weights: Literal["fp8"] | None = None) -> None:
        """Replace the linear layers and embeddings of a model or head by ones that are faster here, in place.

        The model's own forward and ``generate`` work as before, within the rounding of its dtype.

        Args:
            model: on this backend's device, or partly on "meta".
            release: free plain weights that only replaced layers read, so that memory holds each weight once.
                ``state_dict`` lacks their values until :meth:`restore`.
            weights: of a draft head, hold them in this narrower type where that is faster.
        """

    def restore(self, model: nn.Module) -> int:
        """Undo :meth:`prepare`: every layer has its class, weight and forward again. Return the number of layers."""
        return 0

    def stack_for(self, owner: StackOwner) -> Stack:
        """Return what runs the layers of a prepared target or head: a stack of this backend, or the owner's own."""
        return owner.plain_stack
