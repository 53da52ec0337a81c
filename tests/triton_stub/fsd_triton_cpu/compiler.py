"""What Triton's discovery asks for; the interpreter compiles nothing."""

from typing import Any

from triton.backends.compiler import BaseBackend as _Base


class Compiler(_Base):
    """Never used."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return False

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise RuntimeError("kernels run in the interpreter: set TRITON_INTERPRET=1.")

    add_stages = load_dialects = get_module_map = parse_options  # type: ignore[assignment]
