"""What a source does, as far as its syntax tree shows it: which settings of the compiler it changes."""

import ast
import re

from judge.logs.comparable import parse_source

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
        tree = parse_source(source)
    except SyntaxError as e:
        return [f"syntax that this Python can't parse in source line {e.lineno}"]
    lines = {}  # one message for all lines that do the same
    for line, what in sorted({*forbidden_settings(tree), *forbidden_variables(tree)}):
        lines.setdefault(what, []).append(str(line))
    return [f"{what} in source line {', '.join(numbers)}" for what, numbers in lines.items()]


def imports(tree: ast.AST):
    """Yields (line, what is imported, its name in the source)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield node.lineno, module + alias.name, alias.asname or alias.name


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """What an expression like t.compile stands for: "torch.compile". "" if it isn't a name.

    `names` maps names in the source to what they stand for.
    """
    if isinstance(node, ast.Attribute):
        name = f"{full_name(node.value, names)}.{node.attr}"
    else:
        name = getattr(node, "id", "")
    return names.get(name, name)


def is_compile(name: str, imported: set[str]) -> bool:
    """Whether it is torch.compile, or a method like model.compile. What a module that isn't PyTorch
    calls compile, like re.compile, is neither."""
    owner, _, attribute = name.rpartition(".")
    return attribute == "compile" and (owner == "torch" or not {owner, name} & imported)


def forbidden_flags(call: ast.Call, functions: list[str], imported: set[str]):
    """Yields (line, flag) for flags of torch.compile that are not allowed.

    `functions` are what a call like torch.compile(f, ...), partial(torch.compile, ...) or
    model.compile(...) calls or passes on.
    """
    if not any(is_compile(name, imported) for name in functions if "." in name):
        return
    for keyword in call.keywords:
        flag = f"{keyword.arg or '**'}={ast.unparse(keyword.value)}"
        if flag not in ALLOWED_FLAGS:
            yield keyword.value.lineno, f"torch.compile({flag})"


def forbidden_settings(tree: ast.AST):
    """Yields (line, what): uses of torch._inductor.config, and flags of torch.compile."""
    names = {}
    for line, imported, name in imports(tree):
        names[name] = imported
        if imported.startswith("torch._inductor.config"):
            yield line, "torch._inductor.config"
    modules = set(names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and full_name(node, names) == "torch._inductor.config":
            yield node.lineno, "torch._inductor.config"
        elif isinstance(node, ast.Call):
            functions = [full_name(function, names) for function in (node.func, *node.args)]
            yield from forbidden_flags(node, functions, modules)


def harmless_nodes(tree: ast.AST):
    """Yields the nodes in which the name of a variable sets nothing.

    They are in the allowed call, in docstrings, and in places that only read a variable.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = ast.unparse(node)
            if text == ALLOWED_CALL or text.startswith(READS):
                yield from node.args
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield node.slice  # os.environ["NAME"]
        elif isinstance(node, ast.Compare):
            yield node.left  # "NAME" in os.environ
        elif isinstance(node, ast.Expr):
            yield node.value


def forbidden_variables(tree: ast.AST):
    """Yields (line, name) for variables of the compiler that the source may set."""
    harmless = set(harmless_nodes(tree))
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
