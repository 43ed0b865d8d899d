"""What a source does, as far as its syntax tree shows it: which settings of the compiler it changes."""

import ast
import re
import warnings
from collections.abc import Iterator

FLAGS = ("backend", "mode", "options", "dynamic", "fullgraph", None)  # of torch.compile; None: **flags
# fullgraph=True only turns a graph break into an error
ALLOWED_FLAGS = {"dynamic=False", "fullgraph=True"}
# Environment variables of the compiler set torch._inductor.config, so they are forbidden too. There
# are two exceptions: this call, because some versions of GCC compile wrong code without it, and the
# variable that names the cache's folder.
ALLOWED_CALL = "os.environ.setdefault('TORCHINDUCTOR_CPP_MARCH', 'native -mtune=icelake-server')"
ALLOWED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
VARIABLE = re.compile(r"(?:TORCHINDUCTOR|TORCH_COMPILE)_\w*")
READS = ("os.environ.get(", "os.getenv(")


def compiler_settings(source: bytes) -> list[str]:
    """Lists the forbidden compiler settings in a source, one line each.

    A source must not use torch._inductor.config, pass other flags than ALLOWED_FLAGS to
    torch.compile, or set an environment variable of the compiler. The source isn't run: its syntax
    tree is searched. If this Python can't parse it, the only line says so.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source.decode("utf-8", "replace"))
    except SyntaxError as e:
        return [f"syntax that this Python can't parse in source line {e.lineno}"]
    found = set()
    harmless = set()  # arguments of the allowed call, and of calls that only read a variable
    for node in ast.walk(tree):  # a call comes before its arguments
        if isinstance(node, ast.Call) and ast.unparse(node).startswith((ALLOWED_CALL, *READS)):
            harmless.update(node.args)
        if node not in harmless:
            found.update((node.lineno, what) for what in forbidden(node))
    return [f"{what} in source line {line}" for line, what in sorted(found)]


def forbidden(node: ast.AST) -> Iterator[str]:
    """What a node of the syntax tree does that isn't allowed: it uses torch._inductor.config, gives flags to
    torch.compile(f, ...), partial(torch.compile, ...) or model.compile(...), or names a variable of the compiler."""
    # of an attribute, and of what is imported
    names = [getattr(node, kind, None) or "" for kind in ("attr", "name", "module")]
    if "_inductor" in ".".join(names).split("."):
        yield "torch._inductor.config"
    if isinstance(node, ast.ImportFrom) and node.module == "torch":
        if "compile" in [alias.name for alias in node.names]:
            yield "from torch import compile"
    if isinstance(node, ast.Call):
        called = [getattr(function, "attr", "") for function in (node.func, *node.args)]
        for keyword in node.keywords if "compile" in called else []:
            flag = f"{keyword.arg or '**'}={ast.unparse(keyword.value)}"
            if keyword.arg in FLAGS and flag not in ALLOWED_FLAGS:
                yield f"torch.compile({flag})"
    # a string, or os.environ.update(TORCHINDUCTOR_MAX_AUTOTUNE="1")
    for text in (getattr(node, "value", None), getattr(node, "arg", None)):
        match = VARIABLE.match(text) if isinstance(text, str) else None
        if match and match[0] != ALLOWED_VARIABLE:
            yield match[0]
