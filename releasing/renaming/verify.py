"""usage (in the old checkout): python verify.py NEW_CHECKOUT MAP.toml...   compare syntax trees after the renames."""
import ast, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from tool import Project, ROOTS, read_maps

new_root, maps = Path(sys.argv[1]), read_maps(sys.argv[2:])
old = Project(maps)
pairs = {(n, v) for (_, n), v in maps.symbols.items()} | {(a, v) for (_, _, a), v in maps.members.items()}
pairs |= {(n.rpartition(".")[2], v) for (_, n), v in maps.locals.items()}
pairs |= {(k.rpartition(".")[2], v.rpartition(".")[2]) for k, v in maps.modules.items()}
bad = 0


def new_path(f):
    m = old.module[f]
    if not m or maps.module(m) == m:
        return f
    root = ROOTS[m.split(".")[0]]
    return str(Path(root) / (maps.module(m).replace(".", "/") + ("/__init__.py" if f.endswith("__init__.py") else ".py")))


def imports(tree, is_old):
    out = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom):
            for a in n.names:
                mod, name, asname = n.module or "", a.name, a.asname
                if is_old and mod.split(".")[0] in ROOTS:
                    if f"{mod}.{name}" in old.file:
                        mod, _, name = maps.module(f"{mod}.{name}").rpartition(".")
                    else:
                        c = old.canonical(mod, name)
                        name = maps.symbols.get(c, name) if c else name
                        mod = maps.module(mod)
                out.add((mod, name, asname))
        elif isinstance(n, ast.Import):
            for a in n.names:
                out.add((maps.module(a.name) if is_old else a.name, None, a.asname))
    return out


class NoImports(ast.NodeTransformer):
    def visit_Import(self, n):
        return None

    visit_ImportFrom = visit_Import


def same(a, b, f, where):
    global bad
    if type(a) is not type(b):
        bad += 1
        print(f"{f}:{where}: {type(a).__name__} became {type(b).__name__}")
        return
    if isinstance(a, ast.AST):
        line = getattr(a, "lineno", where)
        for k in a._fields:
            same(getattr(a, k, None), getattr(b, k, None), f, line)
    elif isinstance(a, list):
        if len(a) != len(b):
            bad += 1
            print(f"{f}:{where}: {len(a)} parts became {len(b)}")
            return
        for x, y in zip(a, b):
            same(x, y, f, where)
    elif a != b:
        if isinstance(a, str) and ((a, b) in pairs or old.replace_text(a, old.module[f]).split() == b.split() or "".join(old.replace_text(a, old.module[f]).split()) == "".join(b.split())):
            return
        bad += 1
        print(f"{f}:{where}: {a!r:.80} became {b!r:.80}")


for f in old.files:
    g = new_root / new_path(f)
    if not g.exists():
        print("missing", f, g); bad += 1
        continue
    t = ast.parse(g.read_text(encoding="utf-8"))
    if (i := imports(old.tree[f], True)) != (j := imports(t, False)):
        print(f, "imports differ", sorted(map(str, i ^ j))[:6]); bad += 1
    same(NoImports().visit(old.tree[f]), NoImports().visit(t), f, 0)
print(f"{len(old.files)} files, {bad} differences")
