"""Which settings of the compiler a source changes, as far as its text shows it."""

import ast
import re
import warnings

# -----------------------------------------------------------------------------
# Compiler settings in a source

# fullgraph=True only turns a graph break into an error
ALLOWED_FLAGS = {("dynamic", "False"), ("fullgraph", "True")}
# Environment variables of the compiler set torch._inductor.config, so they are forbidden too. There
# are two exceptions: this call, because some versions of GCC compile wrong code without it, and the
# variable that names the cache's folder.
ALLOWED_CALL = 'os.environ.setdefault("TORCHINDUCTOR_CPP_MARCH", "native -mtune=icelake-server")'
ALLOWED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
VARIABLE = re.compile(r"(?:TORCHINDUCTOR|TORCH_COMPILE)_\w*")


def compiler_settings(source: bytes) -> list[str]:
    """Lists the forbidden compiler settings in a source, one line each.

    A source must not use torch._inductor.config, pass other flags than ALLOWED_FLAGS to
    torch.compile, or set an environment variable of the compiler. The source isn't run: its syntax
    tree is searched, or its text if this Python can't parse it.
    """
    text = source.decode("utf-8", "replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = settings_by_text(text) + variables_by_text(text)
    else:
        found = settings_by_tree(tree) + variables_by_tree(tree)
    lines = {}  # one message for all lines that do the same
    for what, line in sorted(set(found), key=lambda pair: pair[1]):
        lines.setdefault(what, []).append(line)
    return [f"{what} in source {line_numbers(numbers)}" for what, numbers in lines.items()]


def line_numbers(numbers: list[int]) -> str:
    """Like "line 5" or "lines 1, 2, 3, 4, 5 and 7 more"."""
    text = ", ".join(str(n) for n in numbers[:5])
    if len(numbers) > 5:
        text += f" and {len(numbers) - 5} more"
    return f"lines {text}" if len(numbers) > 1 else f"line {text}"


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The name that an expression like t.compile stands for: "torch.compile".

    `names` maps aliases to names. "" if the expression isn't a chain of names.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return ""


def imported_names(node: ast.AST, names: dict[str, str]) -> list[str]:
    """What an import statement imports. Adds its aliases to `names`."""
    imported = []
    if isinstance(node, ast.Import):
        for alias in node.names:
            imported.append(alias.name)
            if alias.asname:
                names[alias.asname] = alias.name
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            imported.append(name)
            names[alias.asname or alias.name] = name
    return imported


def forbidden_flags(call: ast.Call, names: dict[str, str]) -> list[tuple[str, int]]:
    """The flags of a call of torch.compile that are not allowed, with their lines.

    Such a call is torch.compile(f, ...), partial(torch.compile, ...) or model.compile(...).
    """
    method_flags = ("fullgraph", "dynamic", "backend", "mode", "options", "disable")
    is_compile = dotted(call.func, names) == "torch.compile"
    for argument in call.args:
        if dotted(argument, names) == "torch.compile":
            is_compile = True
    # A method x.compile counts only if it has a flag of torch.compile; re.compile has none
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "compile"
    found = []
    for keyword in call.keywords:
        method_flag = is_method and keyword.arg in method_flags
        if not is_compile and not method_flag:
            continue
        value = ast.unparse(keyword.value)
        if (keyword.arg, value) not in ALLOWED_FLAGS:
            flag = f"torch.compile({keyword.arg or '**'}={value})"
            found.append((flag, keyword.value.lineno))
    return found


def settings_by_tree(tree: ast.AST) -> list[tuple[str, int]]:
    """Settings of torch._inductor.config and flags of torch.compile, as pairs (what, line)."""
    names = {"torch": "torch", "re": "re"}  # name in the source -> what it stands for
    found = []
    for node in ast.walk(tree):
        for name in imported_names(node, names):
            if name.startswith("torch._inductor.config") or name == "torch._inductor.*":
                found.append(("torch._inductor.config", node.lineno))
    for node in ast.walk(tree):  # compile_it = torch.compile
        if not isinstance(node, ast.Assign):
            continue
        value = dotted(node.value, names)
        if value not in ("torch.compile", "torch._inductor"):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                names[target.id] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node, names) == "torch._inductor.config":
            found.append(("torch._inductor.config", node.lineno))
        elif isinstance(node, ast.Call):
            found += forbidden_flags(node, names)
    return found


def nodes_that_set_nothing(tree: ast.AST) -> set[ast.AST]:
    """The nodes in which the name of a variable is harmless.

    They are the allowed call, docstrings, and the places that only read a variable.
    """
    allowed = ast.dump(ast.parse(ALLOWED_CALL, mode="eval").body)
    nodes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.dump(node) == allowed:
                nodes |= set(ast.walk(node))
            elif ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
                nodes |= set(node.args[:1])
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            nodes.add(node.slice)  # os.environ["NAME"]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            nodes.add(node.left)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            nodes.add(node.value)
    return nodes


def variables_by_tree(tree: ast.AST) -> list[tuple[str, int]]:
    """Variables of the compiler that the source may set, as pairs (name, line)."""
    harmless = nodes_that_set_nothing(tree)
    found = []
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Constant):
            name = node.value
        elif isinstance(node, ast.keyword):  # os.environ.update(TORCHINDUCTOR_MAX_AUTOTUNE="1")
            name = node.arg
        if isinstance(name, bytes):  # os.environb
            name = name.decode("utf-8", "replace")
        if node in harmless or not isinstance(name, str):
            continue
        match = VARIABLE.match(name)
        if match and match[0] != ALLOWED_VARIABLE:
            found.append((match[0], node.lineno))
    return found


def variables_by_text(text: str) -> list[tuple[str, int]]:
    """Like variables_by_tree, for a source that this Python can't parse."""
    text = re.sub(r"#.*", "", text)
    for call in (ALLOWED_CALL, ALLOWED_CALL.replace('"', "'")):
        text = text.replace(call, "")
    name = rf"""["'](?:{VARIABLE.pattern})["']"""
    reads = (
        rf"(?:environ\.get|getenv)\({name}",
        rf"(?<!del os\.)environ\[{name}\](?!\s*[+|]?=[^=])",
        rf"{name} (?:not )?in\b",
    )
    text = re.sub("|".join(reads), "", text)
    found = []
    sets = rf"""["']({VARIABLE.pattern})|[(,]\s*({VARIABLE.pattern})\s*="""
    for match in re.finditer(sets, text):
        name = match[1] or match[2]
        if name != ALLOWED_VARIABLE:
            found.append((name, text.count("\n", 0, match.start()) + 1))
    return found


def settings_by_text(text: str) -> list[tuple[str, int]]:
    """Like settings_by_tree, for a source that this Python can't parse."""
    text = re.sub(r"#.*", "", text)
    found = []
    for match in re.finditer(r"torch\._inductor(?:\.|\s+import\s+)config", text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(("torch._inductor.config", line))
    for call in re.finditer(r"torch\.compile\(([^()]*)", text):
        line = text.count("\n", 0, call.start()) + 1
        for match in re.finditer(r"(\w+)\s*=\s*([^,]*)", call[1]):
            flag = match[1]
            value = match[2].strip()
            if (flag, value) not in ALLOWED_FLAGS:
                found.append((f"torch.compile({flag}={value})", line))
    return found
