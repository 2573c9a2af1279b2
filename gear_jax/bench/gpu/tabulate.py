"""The result as tables, in text and in Markdown."""

from collections.abc import Mapping
from typing import Any

from gear_jax.bench.gpu.findings import HOW
from gear_jax.bench.report import as_markdown, as_text

_ENDS = ("wrong", "failed", "stopped")
_DIRECTIONS = {"h2d": "H2D", "d2h": "D2H"}


def number(value: float) -> str:
    """Three digits: "0.0123", "1.23", "123", "12,300"."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(reached: bool | None) -> str:
    """ "yes", "NO", or "-" where nothing can be said."""
    return "-" if reached is None else "yes" if reached else "NO"


def target_lines(result: Mapping[str, Any]) -> list[list[str]]:
    """The table of targets, its header first."""
    lines = [["target", "wanted", "measured", "ratio or value", "reached", "peers (we are faster by)"]]
    for name, row in result["rows"].items():
        for target in row["targets"]:
            value = "-" if target["value"] is None else number(target["value"])
            lines.append(
                [
                    target["what"],
                    target["wanted"],
                    target["shown"],
                    value,
                    verdict(target["reached"]),
                    _peers(result, name, target),
                ]
            )
        lines += [[name, "", f"{end}: {row[end]}", "-", "-", "-"] for end in _ENDS if end in row]
    return lines


def _peers(result: Mapping[str, Any], name: str, target: Mapping[str, Any]) -> str:
    """The peers that did what a target is about."""
    if name in ("gather", "windows"):  # their peers are a row of their own
        peers = [peer for peer in result["rows"].get("peers", {"peers": []})["peers"] if peer.get("series") == name]
    elif name == "priorities":
        size, _, op = target["what"].removeprefix("prioritised, ").rpartition(": ")
        peers = [peer for peer in result["rows"][name]["peers"] if peer["what"] == f"{op}, {size}"]
    else:
        return "-"
    found = []
    for peer in peers:
        if "missing" in peer:
            found.append(
                f"{peer['name']}: " + ("not installed" if "not installed" in peer["missing"] else "not measured")
            )
        else:
            ratio = "" if peer["ratio"] is None else f" ({number(peer['ratio'])} x)"
            found.append(f"{peer['name']} {number(peer['value'])} {peer['unit']}{ratio}")
    return "; ".join(found) or "-"


def copy_lines(result: Mapping[str, Any]) -> list[list[str]]:
    """`cudaMemcpy` before each row, the header first."""
    lines = [["row", "seconds", "cudaMemcpy H2D, GB/s", "D2H, GB/s", "ended"]]
    for name, row in result["rows"].items():
        copies = [f"{row['memcpy'][way]:.1f}" if way in row["memcpy"] else "-" for way in _DIRECTIONS]
        ended = next((f"{end}: {row[end]}" for end in _ENDS if end in row), "whole")
        lines.append([name, f"{row['seconds']:.1f}", *copies, ended])
    return lines


def figure_lines(row: Mapping[str, Any]) -> list[list[str]]:
    """One row's figures, the header first."""
    lines = [["what", "figure", "timed", "of cudaMemcpy"]]
    for figure in row["figures"]:
        share = f"{figure['ratio']:.3f} of {_DIRECTIONS[figure['of']]} {figure['peak']:.1f}" if "of" in figure else ""
        lines.append([figure["what"], f"{number(figure['value'])} {figure['unit']}", figure["timed"], share])
    return lines


def peer_lines(row: Mapping[str, Any]) -> list[list[str]]:
    """One row's peers, the header first."""
    lines = [["peer", "what", "figure", "we are faster by"]]
    for peer in row["peers"]:
        if "missing" in peer:
            lines.append([peer["name"], peer["what"], peer["missing"], "-"])
            continue
        ratio = "-" if peer["ratio"] is None else f"{number(peer['ratio'])} x"
        lines.append([peer["name"], peer["what"], f"{number(peer['value'])} {peer['unit']}", ratio])
    return lines


def head(result: Mapping[str, Any]) -> str:
    """The machine in a sentence or two."""
    host = result["machine"]
    card = host.get("card", host["device"])
    link = f", PCIe generation {host['pcie_generation']} x{host['pcie_lanes']}" if "pcie_generation" in host else ""
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    return (
        f"{card} ({host.get('memory', '?')}), driver {host.get('driver', '?')}{link}; {host['processor']}, "
        f"{host['cores']} cores, {host['memory_gb']} GB. {versions}. Sizes: {result['options']['size']}."
    )


def tables(result: Mapping[str, Any], markdown: bool = False) -> str:
    """Everything that is shown at the end."""
    render = as_markdown if markdown else as_text
    title = (lambda text: f"## {text}") if markdown else (lambda text: text)
    parts = [head(result), title("Targets"), _cells(render, target_lines(result))]
    if result["memcpy"] != "measured before each row":
        parts.append(result["memcpy"])
    parts += [title("cudaMemcpy, in the same run"), _cells(render, copy_lines(result))]
    for name, row in result["rows"].items():
        if not (row["figures"] or row["peers"] or row["notes"]):
            continue
        parts.append(title(name))
        if row["figures"]:
            parts.append(_cells(render, figure_lines(row)))
        if row["peers"]:
            parts.append(_cells(render, peer_lines(row)))
        parts += [("- " if markdown else "") + note for note in row["notes"]]
    how = [f"{name}: {text}." for name, text in HOW.items()]
    parts.append("\n".join(("- " if markdown else "") + line for line in how))
    return "\n\n".join(parts)


def _cells(render: Any, lines: list[list[str]]) -> str:
    """A table; what would end a cell or a line is taken out."""
    return render([[" ".join(cell.replace("|", "/").split()) for cell in line] for line in lines])
