"""What a source does, as far as its syntax tree shows it: which settings of the compiler it changes."""

import ast
import re
import warnings

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
    found = sorted({*forbidden_settings(tree), *forbidden_variables(tree)})
    return [f"{what} in source line {line}" for line, what in found]


def forbidden_settings(tree: ast.AST):
    """Yields (line, what): uses of torch._inductor.config, and flags of torch.compile(f, ...),
    partial(torch.compile, ...) or model.compile(...)."""
    for node in ast.walk(tree):
        # of an attribute, and of what is imported
        names = [getattr(node, kind, None) or "" for kind in ("attr", "name", "module")]
        if "_inductor" in ".".join(names).split("."):
            yield node.lineno, "torch._inductor.config"
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            if "compile" in [alias.name for alias in node.names]:
                yield node.lineno, "from torch import compile"
        if isinstance(node, ast.Call):
            called = [getattr(function, "attr", "") for function in (node.func, *node.args)]
            for keyword in node.keywords if "compile" in called else []:
                flag = f"{keyword.arg or '**'}={ast.unparse(keyword.value)}"
                if keyword.arg in FLAGS and flag not in ALLOWED_FLAGS:
                    yield keyword.value.lineno, f"torch.compile({flag})"


def forbidden_variables(tree: ast.AST):
    """Yields (line, name) for variables of the compiler that the source may set: not in the allowed call, and
    not where a variable is only read."""
    harmless = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node).startswith((ALLOWED_CALL, *READS)):
            harmless.update(node.args)
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Constant):
            name = node.value
        elif isinstance(node, ast.keyword):  # os.environ.update(TORCHINDUCTOR_MAX_AUTOTUNE="1")
            name = node.arg
        if node in harmless or not isinstance(name, str):
            continue
        match = VARIABLE.match(name)
        if match and match[0] != ALLOWED_VARIABLE:
            yield node.lineno, match[0]
