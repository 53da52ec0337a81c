"""Draw a package as a house: a room per module or subpackage, a floor per step of its longest chain of imports.

An arrow points from a room to what it imports. It is dashed if every such import is inside a function. Arrows of a
circle are red. Imports for type checkers and the packages' own ``__init__`` are left out. The number in a room is its
lines. Circles are counted among modules.

    python scripts/draw_house.py docs/figures/house.png
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import networkx as nx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PACKAGES = ("fsd_core", "fsd_infer", "fsd_bench", "fsd_train")


def modules(root: Path, package: str) -> nx.DiGraph:
    """Return the modules of a package below ``root``. Edges are imports, ``lazy`` if only functions import."""
    files = {file: file.relative_to(root).with_suffix("").parts for file in sorted((root / package).rglob("*.py"))}
    names = {file: ".".join(parts[:-1] if parts[-1] == "__init__" else parts) for file, parts in files.items()}
    graph = nx.DiGraph()
    for file, name in names.items():
        if name != package:
            graph.add_node(name, lines=len(file.read_text(encoding="utf-8").splitlines()))
    for file, name in names.items():
        for imported, lazy in _imports(ast.parse(file.read_text(encoding="utf-8")), files[file][:-1]):
            other = imported if imported in graph else imported.rpartition(".")[0]
            if name in graph and other in graph and other != name:
                known = graph.get_edge_data(name, other, {"lazy": True})["lazy"]
                graph.add_edge(name, other, lazy=lazy and known)
    return graph


def rooms(graph: nx.DiGraph) -> nx.DiGraph:
    """Return the graph with each subpackage as one room."""
    house = nx.DiGraph()
    for name, facts in graph.nodes(data=True):
        room = name.split(".")[1]
        house.add_node(room, lines=house.nodes.get(room, {"lines": 0})["lines"] + facts["lines"])
    for name, other, facts in graph.edges(data=True):
        room, below = name.split(".")[1], other.split(".")[1]
        if room != below:
            known = house.get_edge_data(room, below, {"lazy": True})["lazy"]
            house.add_edge(room, below, lazy=facts["lazy"] and known)
    return house


def _imports(tree: ast.AST, package: tuple[str, ...], lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield (module, whether a function imports it). ``from package import name`` gives package.name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            yield from ((f"{base}.{alias.name}", lazy) for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(node, package, inside)


def circles(graph: nx.DiGraph) -> list[set[str]]:
    """Return groups of rooms that import each other, directly or indirectly."""
    return [group for group in nx.strongly_connected_components(graph) if len(group) > 1]


def floors(graph: nx.DiGraph) -> dict[str, int]:
    """Return each room's floor: 0 without imports, else one above the highest room it imports. Circles share one."""
    groups = nx.condensation(graph)
    height: dict[int, int] = {}
    for group in reversed(list(nx.topological_sort(groups))):
        height[group] = max((height[below] + 1 for below in groups.successors(group)), default=0)
    return {room: height[group] for room, group in groups.graph["mapping"].items()}


def summary(graph: nx.DiGraph) -> str:
    """Return the counts of a package in one line, from the graph of its modules."""
    house, loops = rooms(graph), circles(graph)
    named = "" if not loops else " (" + "; ".join(" ↔ ".join(sorted(group)) for group in loops) + ")"
    return (
        f"{len(graph)} modules in {len(house)} rooms on {max(floors(house).values()) + 1} floors, "
        f"{house.number_of_edges()} arrows, circles: {len(loops)}{named}"
    )


def draw(axes: plt.Axes, graph: nx.DiGraph, title: str) -> None:
    """Draw one house from the graph of its modules."""
    title = f"{title}: {summary(graph)}"
    graph = rooms(graph)
    height = floors(graph)
    rows = [sorted(room for room in graph if height[room] == floor) for floor in range(max(height.values()) + 1)]
    widest = max(map(len, rows))
    x = {room: (i + 0.5) / len(row) * widest for row in rows for i, room in enumerate(row)}
    for _ in range(8):  # order each floor by the places of its neighbours
        for row in rows:
            near = {r: [x[other] for other in nx.all_neighbors(graph, r)] or [x[r]] for r in row}
            row.sort(key=lambda r: sum(near[r]) / len(near[r]))
            x.update({room: (i + 0.5) / len(row) * widest for i, room in enumerate(row)})
    looped = circles(graph)
    for room, other, facts in graph.edges(data=True):
        red = any({room, other} <= group for group in looped)
        same = height[room] == height[other]
        axes.annotate(
            "", (x[other], height[other]), (x[room], height[room]),
            arrowprops=dict(
                arrowstyle="-|>", shrinkA=9, shrinkB=9, linewidth=1.2 if red else 0.6, alpha=1 if red else 0.45,
                linestyle="--" if facts["lazy"] else "-", color="#c0392b" if red else "#34495e",
                connectionstyle=f"arc3,rad={-0.35 if same else 0.04}",
            ),
        )  # fmt: skip
    for room in graph:
        axes.text(
            x[room], height[room], f"{room}\n{graph.nodes[room]['lines']}", ha="center", va="center", fontsize=7,
            bbox=dict(boxstyle="round,pad=0.25", facecolor="#fdf6e3", edgecolor="#8a7f66", linewidth=0.7),
        )  # fmt: skip
    axes.set(xlim=(0, widest), ylim=(-0.6, len(rows) - 0.4), yticks=range(len(rows)), xticks=[])
    axes.set_ylabel("floor")
    axes.set_title(title, fontsize=9, loc="left", wrap=True)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path, help="picture to write")
    args = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    graphs = {package: modules(root, package) for package in PACKAGES}
    tall = [max(floors(rooms(graph)).values()) + 1 for graph in graphs.values()]
    figure, panels = plt.subplots(
        len(graphs), 1, figsize=(12, 0.75 * sum(tall) + 1.5), height_ratios=tall, layout="constrained"
    )
    for axes, (package, graph) in zip(panels, graphs.items()):
        draw(axes, graph, package)
        print(f"{package}: {summary(graph)}")
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
