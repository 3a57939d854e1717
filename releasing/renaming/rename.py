"""Apply a map of old to new paths and symbols to a checkout, and verify that nothing else changed.

usage: python rename.py MAP.toml... [--write]        print what would change, or write it
       python rename.py MAP.toml... --verify REV     compare each syntax tree with that of a revision, after the renames

MAP.toml has the tables [modules] (dotted module or package = dotted module), [symbols] ("module:name" = "new"),
[members] ("module:Class.name" = "new"), [locals] ("module:outer.inner" = "new") and [paths] (old file or folder = new).
Keys are names of before.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOTS = {
    "clika_ref": ".",
    "clika_ref_conformance": "conformance",
    **{f"clika_ref_{n}": f"plugins/{n}" for n in ("aten", "cleanup", "onnxruntime", "openvino", "tensorrt", "example")},
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


SKIPPED = {"CHANGELOG.md", }
LATE = "clika_ref.command_line"


def late_module(n):
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "late" and n.args and isinstance(n.args[0], ast.Constant):
        return f"{LATE}.{n.args[0].value}"
    return None


def tracked(*patterns: str) -> list[str]:
    return subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split()


def module_of(path: str) -> str | None:
    for root, folder in ROOTS.items():
        prefix = "" if folder == "." else folder + "/"
        if path.startswith(prefix + root + "/") and path.endswith(".py"):
            return path[len(prefix) : -3].replace("/", ".").removesuffix(".__init__")
    return None


@dataclass
class Maps:
    modules: dict[str, str] = field(default_factory=dict)
    symbols: dict[tuple[str, str], str] = field(default_factory=dict)
    members: dict[tuple[str, str, str], str] = field(default_factory=dict)
    locals: dict[tuple[str, str], str] = field(default_factory=dict)

    def module(self, name: str) -> str:
        """New dotted name of a module, by its longest mapped prefix."""
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            if new := self.modules.get(".".join(parts[:n])):
                return ".".join([new, *parts[n:]])
        return name


def read_maps(files: list[str]) -> Maps:
    maps = Maps()
    for file in files:
        d = tomllib.loads(Path(file).read_text())
        maps.modules.update(d.get("modules", {}))
        for k, v in d.get("symbols", {}).items():
            m, _, n = k.partition(":")
            maps.symbols[m, n] = v
        for k, v in d.get("members", {}).items():
            m, _, n = k.partition(":")
            c, _, a = n.rpartition(".")
            maps.members[m, c, a] = v
        for k, v in d.get("locals", {}).items():
            m, _, n = k.partition(":")
            maps.locals[m, n] = v
    return maps


class Scope:
    def __init__(self, node, parent, kind):
        self.node, self.parent, self.kind = node, parent, kind
        self.bound: dict[str, list] = defaultdict(list)  # name -> binding nodes
        self.outer: set[str] = set()
        self.uses: list[tuple[str, ast.AST]] = []
        self.path: str = ""

    def resolve(self, name):
        scope, first = self, True
        while scope is not None:
            if name in scope.outer:
                scope = scope.root()
                return scope
            if name in scope.bound and (first or scope.kind != "class"):
                return scope
            scope, first = scope.parent, False
        return None

    def root(self):
        s = self
        while s.parent is not None:
            s = s.parent
        return s


class Binder(ast.NodeVisitor):
    """Collect scopes, bindings and uses of names."""

    def __init__(self, tree):
        self.scope = self.top = Scope(tree, None, "module")
        self.scopes = [self.top]
        for n in tree.body:
            self.visit(n)

    def enter(self, node, kind, name=""):
        s = Scope(node, self.scope, kind)
        s.path = f"{self.scope.path}.{name}".strip(".")
        self.scopes.append(s)
        return s

    def bind(self, name, node):
        self.scope.bound[name].append(node)

    def visit_Name(self, n):
        if isinstance(n.ctx, ast.Store | ast.Del):
            s = self.scope
            if n.id in s.outer:
                s = s.root()
            s.bound[n.id].append(n)
        self.scope.uses.append((n.id, n))

    def visit_NamedExpr(self, n):
        s = self.scope
        while s.kind == "comprehension":
            s = s.parent
        s.bound[n.target.id].append(n.target)
        s.uses.append((n.target.id, n.target))
        self.visit(n.value)

    def visit_Global(self, n):
        self.scope.outer.update(n.names)

    def visit_Nonlocal(self, n):
        pass

    def visit_Import(self, n):
        for a in n.names:
            self.bind((a.asname or a.name).split(".")[0], (n, a))

    visit_ImportFrom = visit_Import

    def visit_ExceptHandler(self, n):
        if n.name:
            self.bind(n.name, n)
        self.generic_visit(n)

    def visit_MatchAs(self, n):
        if n.name:
            self.bind(n.name, n)
        self.generic_visit(n)

    def visit_MatchStar(self, n):
        if n.name:
            self.bind(n.name, n)

    def visit_MatchMapping(self, n):
        if n.rest:
            self.bind(n.rest, n)
        self.generic_visit(n)

    def visit_ClassDef(self, n):
        self.bind(n.name, n)
        for d in (*n.decorator_list, *n.bases, *n.keywords):
            self.visit(d)
        old, self.scope = self.scope, self.enter(n, "class", n.name)
        for b in n.body:
            self.visit(b)
        self.scope = old

    def visit_FunctionDef(self, n):
        if not isinstance(n, ast.Lambda):
            self.bind(n.name, n)
            for d in n.decorator_list:
                self.visit(d)
            if n.returns:
                self.visit(n.returns)
        a = n.args
        for d in (*a.defaults, *(k for k in a.kw_defaults if k)):
            self.visit(d)
        args = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
        for g in args:
            if g.annotation:
                self.visit(g.annotation)
        old, self.scope = self.scope, self.enter(n, "function", getattr(n, "name", "<lambda>"))
        for g in args:
            self.bind(g.arg, g)
        for b in n.body if isinstance(n.body, list) else [n.body]:
            self.visit(b)
        self.scope = old

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def comprehension(self, n):
        self.visit(n.generators[0].iter)
        old, self.scope = self.scope, self.enter(n, "comprehension", "<comp>")
        for i, g in enumerate(n.generators):
            self.visit(g.target)
            if i:
                self.visit(g.iter)
            for c in g.ifs:
                self.visit(c)
        for f in ("elt", "key", "value"):
            if hasattr(n, f):
                self.visit(getattr(n, f))
        self.scope = old

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = comprehension


class Project:
    def __init__(self, maps):
        self.maps = maps
        self.files = tracked("*.py")
        self.text = {f: Path(f).read_text(encoding="utf-8") for f in self.files}
        self.tree = {f: ast.parse(t) for f, t in self.text.items()}
        self.module = {f: module_of(f) for f in self.files}
        self.file = {m: f for f, m in self.module.items() if m}
        self.binder = {f: Binder(t) for f, t in self.tree.items()}
        self.problems: list[str] = []
        self.private: set[tuple[str, str, str]] = set()  # ambiguous private members: renamed inside their class only
        self.foreign: dict[str, set[str]] = {}
        self.all_member_names = self.member_names = self._member_names()

    def _member_names(self):
        """Old attribute name -> new, where every class of the repository that defines it is renamed alike."""
        owners = defaultdict(set)
        for f, b in self.binder.items():
            m = self.module[f] or f
            for s in b.scopes:
                if s.kind != "class":
                    continue
                for name in s.bound:
                    owners[name].add((m, s.path))
                for x in ast.walk(s.node):
                    if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and isinstance(x.value, ast.Name) and x.value.id == "self":
                        owners[x.attr].add((m, s.path))
        new = defaultdict(set)
        for (m, c, a), v in self.maps.members.items():
            new[a].add(v)
        out = {}
        for a, vs in new.items():
            mapped = {(m, c) for (m, c, x) in self.maps.members if x == a}
            rest = {o for o in owners[a] if o not in mapped and not o[0].endswith(".py")}
            foreign = {o[0] for o in owners[a] if o[0].endswith(".py")}
            if foreign and len(vs) == 1 and not rest:
                self.foreign[a] = foreign
                self.problems.append(f"note: member {a} is not renamed in {sorted(foreign)}, which define it themselves")
            if a.startswith("_") and (len(vs) > 1 or rest):
                self.private |= {(m, c, a) for (m, c, x) in self.maps.members if x == a}
            elif len(vs) > 1:
                self.problems.append(f"member {a}: several new names {sorted(vs)}")
            elif rest:
                self.problems.append(f"member {a} -> {sorted(vs)[0]}: also in {sorted(rest)[:4]}")
            else:
                out[a] = vs.pop()
        return out

    def resolve_module(self, dotted):
        return dotted if dotted in self.file else None

    def canonical(self, module, name, seen=()):
        """Where a name that is imported from a module is defined: (module, name), or a module."""
        f = self.file.get(module)
        if f is None or (module, name) in seen:
            return None
        if f"{module}.{name}" in self.file:
            return (f"{module}.{name}", None)
        for b in self.binder[f].top.bound.get(name, []):
            if isinstance(b, tuple):
                n, a = b
                if isinstance(n, ast.ImportFrom) and n.module and n.level == 0:
                    return self.canonical(n.module, a.name, (*seen, (module, name)))
                return None
            return (module, name)
        return None

    # edits

    def edits(self, f):
        out: set[tuple[int, int, str, str]] = set()  # line, col (bytes), old, new
        self.member_names = {a: v for a, v in self.all_member_names.items() if f not in self.foreign.get(a, ())}
        b, m, maps = self.binder[f], self.module[f], self.maps
        renamed: dict[tuple[int, str], str] = {}  # (scope id, name) -> new local name
        meaning: dict[tuple[int, str], tuple] = {}  # (scope id, name) -> canonical (module, None) or (module, symbol)
        for s in b.scopes:
            for name, bindings in s.bound.items():
                for x in bindings:
                    if not isinstance(x, tuple):
                        continue
                    n, a = x
                    if isinstance(n, ast.ImportFrom) and n.module and n.module.split(".")[0] in ROOTS and n.level == 0:
                        target = self.canonical(n.module, a.name)
                        if target is None:
                            continue
                        meaning[id(s), name] = target
                        if target[1] is None:
                            new_full = maps.module(target[0])
                            new = new_full.rpartition(".")[2]
                        else:
                            new = maps.symbols.get(target, a.name)
                        if new != a.name:
                            out.add((a.lineno, a.col_offset, a.name, new))
                            if a.asname is None:
                                renamed[id(s), name] = new
                    elif isinstance(n, ast.Import) and a.name.split(".")[0] in ROOTS:
                        if a.asname and self.resolve_module(a.name):
                            meaning[id(s), name] = (a.name, None)
                        elif not a.asname:
                            meaning[id(s), name] = (a.name.split(".")[0], None)
                        if maps.module(a.name) != a.name:
                            out.add((a.lineno, a.col_offset, a.name, maps.module(a.name)))
        if m and m.startswith(LATE):
            self._late(b, meaning, out)
        if m:
            for name in b.top.bound:
                if new := maps.symbols.get((m, name)):
                    if any(not isinstance(x, tuple) for x in b.top.bound[name]):
                        renamed[id(b.top), name] = new
                        meaning[id(b.top), name] = (m, name)
            for name in b.top.bound:
                if (id(b.top), name) not in meaning and any(not isinstance(x, tuple) for x in b.top.bound[name]):
                    meaning[id(b.top), name] = (m, name)
            for s in b.scopes:
                for name in s.bound:
                    if new := maps.locals.get((m, f"{s.path}.{name}")):
                        renamed[id(s), name] = new
        # from-imports: module part
        for n in ast.walk(b.top.node):
            if isinstance(n, ast.ImportFrom) and n.module and n.module.split(".")[0] in ROOTS and n.level == 0:
                self._import_from(f, n, out)
        # names
        for s in b.scopes:
            for name, node in s.uses:
                target = s.resolve(name)
                if target is not None and (new := renamed.get((id(target), name))):
                    out.add((node.lineno, node.col_offset, name, new))
                    clash = s.resolve(new)
                    if clash is not None and (clash is not target or (id(target), new) not in renamed):
                        if not (clash is target and self._only_renamed_away(renamed, clash, new)):
                            self.problems.append(f"{f}:{node.lineno}: {name} -> {new} collides with a name there")
            for name, bindings in s.bound.items():
                if new := renamed.get((id(s), name)):
                    for x in bindings:
                        if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                            self._definition(f, x, name, new, out)
                        elif isinstance(x, ast.arg | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                            self.problems.append(f"{f}: {name} bound by {type(x).__name__}")
            # members
            if s.kind == "class":
                mine = {a: maps.members[x, c, a] for x, c, a in self.private if (x, c) == (m, s.path)}
                for n in ast.walk(s.node) if mine else ():
                    if isinstance(n, ast.Attribute) and n.attr in mine and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls", s.node.name):
                        out.add((n.end_lineno, n.end_col_offset - len(n.attr.encode()), n.attr, mine[n.attr]))
                for name, bindings in s.bound.items():
                    if (m, s.path, name) in maps.members and (name in self.member_names or name in mine):
                        new = mine.get(name) or self.member_names[name]
                        for x in bindings:
                            if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                                self._definition(f, x, name, new, out)
                            elif isinstance(x, ast.Name):
                                out.add((x.lineno, x.col_offset, name, new))
                        for k, v in s.uses:
                            if k == name and s.resolve(k) is s:
                                out.add((v.lineno, v.col_offset, name, new))
        # attributes and strings
        parents = {}
        for n in ast.walk(b.top.node):
            for c in ast.iter_child_nodes(n):
                parents[c] = n
        scope_of = {}
        for s in b.scopes:
            for name, node in s.uses:
                scope_of[node] = s
        for n in ast.walk(b.top.node):
            if isinstance(n, ast.Attribute):
                target = self._dotted(n, scope_of, meaning)
                if target is not None:
                    kind, (tm, tn) = target
                    if tn is None:
                        old, new = tm.rpartition(".")[2], maps.module(tm).rpartition(".")[2]
                    else:
                        old, new = tn, maps.symbols.get((tm, tn), tn)
                    if old != new:
                        out.add((n.end_lineno, n.end_col_offset - len(n.attr.encode()), n.attr, new))
                    continue
                if n.attr in self.member_names:
                    out.add((n.end_lineno, n.end_col_offset - len(n.attr.encode()), n.attr, self.member_names[n.attr]))
            elif isinstance(n, ast.keyword) and n.arg in self.member_names:
                call = parents[n]
                if isinstance(call, ast.Call) and self._makes_member(call, n.arg, scope_of, meaning):
                    out.add((n.lineno, n.col_offset, n.arg, self.member_names[n.arg]))
            elif isinstance(n, ast.Call):
                for owner, text in zip(n.args, n.args[1:]):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        self._named_by_string(n, owner, text, scope_of, meaning, out)
            elif isinstance(n, ast.MatchClass):
                for k in n.kwd_attrs:
                    if k in self.member_names:
                        self.problems.append(f"{f}:{n.lineno}: match keyword {k}")
        return out

    def _late(self, b, meaning, out):
        """Modules that ``late("name")`` of the command line imports."""
        for s in b.scopes:
            for n in ast.walk(s.node):
                if isinstance(n, ast.Assign):
                    pairs = zip(n.targets[0].elts, n.value.elts) if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple) else [(n.targets[0], n.value)]
                    for t, v in pairs:
                        if isinstance(t, ast.Name) and (full := late_module(v)) in self.file and t.id in s.bound:
                            meaning[id(s), t.id] = (full, None)
                if (full := late_module(n)) in self.file:
                    new = self.maps.module(full).rpartition(".")[2]
                    if new != n.args[0].value:
                        out.add((n.args[0].lineno, n.args[0].col_offset + 1, n.args[0].value, new))

    def _only_renamed_away(self, renamed, scope, name):
        return (id(scope), name) in renamed

    def _makes_member(self, call, name, scope_of, meaning):
        fn = call.func
        if isinstance(fn, ast.Name) and fn.id in ("replace", "cls", "make_dataclass"):
            return True
        if isinstance(fn, ast.Attribute) and fn.attr in ("replace", "evolve") and isinstance(fn.value, ast.Name) and fn.value.id in ("dataclasses", "attrs"):
            return True
        last = fn.id if isinstance(fn, ast.Name) else fn.attr if isinstance(fn, ast.Attribute) else ""
        return any(c.rpartition(".")[2] == last for (_, c, a) in self.maps.members if a == name) or any(
            a == last and x == name for (_, c, x) in self.maps.members for a in [c.rpartition(".")[2]])

    def _named_by_string(self, call, owner, text, scope_of, meaning, out):
        """setattr(owner, "name", ...): monkeypatch and the like."""
        target = None
        if isinstance(owner, ast.Name) and owner in scope_of:
            s = scope_of[owner].resolve(owner.id)
            target = s and meaning.get((id(s), owner.id))
        elif isinstance(owner, ast.Attribute):
            found = self._dotted(owner, scope_of, meaning)
            target = found and found[1]
        new = None
        fn = call.func
        last = fn.attr if isinstance(fn, ast.Attribute) else fn.id if isinstance(fn, ast.Name) else ""
        if target and target[1] is None:
            new = self.maps.symbols.get((target[0], text.value))
            if new is None and (c := self.canonical(target[0], text.value)) and c[1]:
                new = self.maps.symbols.get(c)
        if new is None and target and target[1]:
            new = self.maps.members.get((*target, text.value))
        if new is None and last in ("setattr", "getattr", "hasattr", "delattr", "object"):
            new = self.member_names.get(text.value)
        if new and text.lineno == text.end_lineno:
            out.add((text.lineno, text.col_offset + 1, text.value, new))

    def _dotted(self, n, scope_of, meaning):
        """What an attribute of a module is: a module, or a symbol of one."""
        if isinstance(n.value, ast.Name):
            s = scope_of.get(n.value)
            s = s and s.resolve(n.value.id)
            base = s and meaning.get((id(s), n.value.id))
        elif isinstance(n.value, ast.Attribute):
            found = self._dotted(n.value, scope_of, meaning)
            base = found and found[1]
        elif (full := late_module(n.value)) in self.file:
            base = (full, None)
        else:
            return None
        if not base or base[1] is not None:
            return None
        found = self.canonical(base[0], n.attr)
        return ("x", found) if found else None

    def _definition(self, f, node, name, new, out):
        line = node.lineno
        text = self.text[f].splitlines()[line - 1]
        at = re.search(rf"\b(?:def|class)\s+({re.escape(name)})\b", text)
        assert at, (f, line, name)
        out.add((line, len(text[: at.start(1)].encode()), name, new))

    def _import_from(self, f, n, out):
        """The module of a from-import; statements whose names end in several modules are split later by hand."""
        maps = self.maps
        news = set()
        for a in n.names:
            sub = f"{n.module}.{a.name}"
            if sub in self.file:
                news.add(maps.module(sub).rpartition(".")[0])
            else:
                news.add(maps.module(n.module))
        if len(news) > 1:
            self.problems.append(f"{f}:{n.lineno}: from {n.module} import ... goes to {sorted(news)}")
            return
        new = news.pop()
        if new != n.module:
            text = self.text[f].splitlines()[n.lineno - 1]
            at = re.search(r"from\s+([\w.]+)", text[n.col_offset :])
            out.add((n.lineno, n.col_offset + at.start(1), n.module, new))

    def string_patterns(self):
        """Old dotted text -> new, for strings, comments and documents."""
        return None

    def replace_text(self, text, module=None):
        """Rename dotted names, paths of files and, in backticks, symbols, in prose and strings."""
        maps = self.maps

        def dotted(match):
            whole = match[0]
            parts = re.split(r"[.:]", whole)
            n = len(parts)
            while n and ".".join(parts[:n]) not in self.file:
                n -= 1
            if n == 0:
                return whole
            old = ".".join(parts[:n])
            rest, seps = parts[n:], re.findall(r"[.:]", whole)[n - 1 :]
            new = [maps.module(old)]
            if rest:
                c = self.canonical(old, rest[0])
                key = c if c and c[1] else (old, rest[0])
                rest[0] = maps.symbols.get(key, rest[0])
                for i in range(1, len(rest)):
                    rest[i] = self.member_names.get(rest[i], rest[i])
                for sep, r in zip(seps, rest, strict=True):
                    new.append(sep + r)
            return "".join(new)

        roots = "|".join(sorted(ROOTS, key=len, reverse=True))
        text = re.sub(rf"\b(?:{roots})(?:[.:][A-Za-z_]\w*)+", dotted, text)

        def path(match):
            m = module_of(match[0].lstrip("/"))
            found = m in self.file if m else False
            if not found:
                return match[0]
            new = maps.module(m)
            root = ROOTS[m.split(".")[0]]
            is_init = match[0].endswith("__init__.py")
            tail = new.replace(".", "/") + ("/__init__.py" if is_init else ".py")
            return tail if root == "." else f"{root}/{tail}"

        text = re.sub(rf"(?:(?:conformance|plugins/\w+)/)?\b(?:{roots})(?:/\w+)+\.py\b", path, text)

        def code(match):
            name, call = match[2], match[3]
            new = None
            telling = "_" in name or name.lower() != name or "(" in call
            if module is None and not telling:
                return match[0]
            if module and (module, name) in maps.symbols:
                new = maps.symbols[module, name]
            elif module and name in self.binder[self.file[module]].top.bound:
                c = self.canonical(module, name)
                new = maps.symbols.get(c) if c and c[1] else None
            elif telling and (values := self.unique.get(name)) and len(values) == 1:
                new = next(iter(values))
            elif name in self.member_names:
                new = self.member_names[name]
            return f"{match[1]}{new or name}{call}"

        return re.sub(r"(?<!`)(`)([A-Za-z_]\w*)((?:\([^`]*\))?`)(?!`)", code, text)

    @property
    def unique(self):
        if not hasattr(self, "_unique"):
            u, defined = defaultdict(set), defaultdict(set)
            for f, m in self.module.items():
                if m:
                    for name, bs in self.binder[f].top.bound.items():
                        if any(not isinstance(x, tuple) for x in bs):
                            defined[name].add(self.maps.symbols.get((m, name), name))
            self._unique = {k: v for k, v in defined.items() if len(v) == 1 and k not in v and len(k) > 4}
        return self._unique


def apply(text, edits, problems, f):
    lines = [l.encode() for l in text.splitlines(keepends=True)]
    by = defaultdict(list)
    for line, col, old, new in edits:
        by[line].append((col, old, new))
    for line, es in by.items():
        raw = lines[line - 1]
        done = set()
        for col, old, new in sorted(set(es), reverse=True):
            o, w = old.encode(), new.encode()
            if raw[col : col + len(o)] == o:
                raw = raw[:col] + w + raw[col + len(o) :]
                done.add((col, old))
            else:
                problems.append(f"{f}:{line}:{col}: expected {old}")
        lines[line - 1] = raw
    return b"".join(lines).decode()


def replace_in_strings(project, f, text):
    """Rename inside strings and comments of Python source."""
    import io
    import tokenize

    out, last = [], 0
    starts = [0]
    for l in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(l))
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type in (tokenize.STRING, tokenize.COMMENT):
            a, b = starts[t.start[0] - 1] + t.start[1], starts[t.end[0] - 1] + t.end[1]
            new = project.replace_text(text[a:b], project.module[f])
            if new != text[a:b]:
                out += [text[last:a], new]
                last = b
    return "".join([*out, text[last:]])


def main():
    args = sys.argv[1:]
    write = "--write" in args
    maps = read_maps([a for a in args if a.endswith(".toml")])
    project = Project(maps)
    changed = {}
    for f in project.files:
        # strings first would shift columns: apply edits of names, then those of strings
        text = apply(project.text[f], project.edits(f), project.problems, f)
        text = replace_in_strings(project, f, text)
        if text != project.text[f]:
            changed[f] = text
    others = [f for f in tracked("*.md", "*.toml", "*.yml", "*.yaml", "*.html", "*.template", "*.txt", "Makefile", ".ci/run", "*.js", "*.css", "*.cpp") if f not in SKIPPED and Path(f).exists()]
    for f in others:
        old = Path(f).read_text(encoding="utf-8")
        new = project.replace_text(old)
        if new != old:
            changed[f] = new
    for p in project.problems:
        print(p)
    print(f"{len(changed)} files would change, {len(project.problems)} problems")
    if write:
        for f, text in changed.items():
            Path(f).write_text(text, encoding="utf-8")
        for f, m in project.module.items():
            if m and maps.module(m) != m:
                new = maps.module(m)
                root = ROOTS[m.split(".")[0]]
                target = Path(root) / (new.replace(".", "/") + ("/__init__.py" if f.endswith("__init__.py") else ".py"))
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["git", "mv", f, str(target)], check=True)


if __name__ == "__main__":
    main()
