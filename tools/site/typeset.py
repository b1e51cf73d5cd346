"""The plain-text mathematics of docstrings, typeset: ``$gB = L^-H W$`` becomes Markdown with ``\\(g_{B} = L^{-H} W\\)``.

Docstrings are read in editors, so they have no LaTeX: mathematics is plain text between dollar signs. Everything else
is prose, in which shapes and names with an underscore or a dot are code.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["MARK", "typeset"]

MARK = "$"
GREEK = {
    "phi": r"\varphi",
    "psi": r"\psi",
    "pi": r"\pi",
    "tau": r"\tau",
    "eps": r"\varepsilon",
    "sigma": r"\sigma",
    "lambda": r"\lambda",
    "mu": r"\mu",
    "zeta": r"\zeta",
    "alpha": r"\alpha",
    "beta": r"\beta",
    "Gamma": r"\Gamma",
    "Psi": r"\Psi",
    "Phi": r"\Phi",
    "Omega": r"\Omega",
    "inf": r"\infty",
    "Vh": "{V^{H}}",
}
FUNCTIONS = (
    "sum prod max min log exp sin cos tan sinh cosh tanh sec asin acos atan atan2 sqrt conj diag tr adj Re Im tril triu sign "
    "sgn norm mean erf erfc softmax softplus log_softmax det rank sym skew digamma floor round logsumexp var cumsum arg"
).split()
SYMBOLS = {
    "<=": r"\le ",
    ">=": r"\ge ",
    "!=": r"\ne ",
    "->": r"\to ",
    "+-": r"\pm ",
    "-+": r"\mp ",
    "|": r"\vert ",
    "...": r"\dots ",
    "*": r"\ast ",
    "<": r"\lt ",
    ">": r"\gt ",
    "{": r"\{",
    "}": r"\}",
    "langle": r"\langle ",
    "rangle": r"\rangle ",
    "||": r"\Vert ",
}
PAIRS = {"(": ")", "[": "]", "langle": "rangle"}
# An unmarked tuple with a star or a lone letter is a shape: (*, m, n), (N, C), (4 n,). Mathematics would be marked.
_SIZE = r"(?:\*\w*|\.\.\.|(?:\d+\ )?[A-Za-z]\w*(?:\ [-+*/]+\ \w+)*|[A-Za-z]\ [A-Za-z]|\d+)"
PROSE = re.compile(
    rf"""``(?P<code>[^`]+)`` | `(?P<name>[^`]+)`
      | \$(?P<mathematics>[^$]+)\$
      | (?P<shape>(?<!\w)\((?=[^()]*(?:\*|\b[A-Za-z]\b)){_SIZE}(?:,|(?:,\s{_SIZE})+)\)|\(\*\))
      | (?P<identifier>\b\w*[A-Za-z]\w*_\w+(?:\([^()]*\))?|\b_\w+|\b[A-Za-z]\w{{2,}}\.\w[\w.]*\w)
      | (?P<special>[\\*_\[\]<>|$])""",
    re.VERBOSE,
)
TOKEN = re.compile(
    r"""(?P<long>[A-Za-z]{3,}_\w{3,}|grad_\w+)
      | (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
      | (?P<name>[A-Za-z]\d(?![\w.])|[A-Za-z]\d(?=_)|atan2|[A-Za-z]+)
      | (?P<op>\|\||\+-|-\+|<=|>=|!=|->|\.\.\.|[-+*/^_=<>|()\[\]{},;'~])
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    before: str  # the white space before it


def typeset(text: str) -> str:
    """Markdown of a paragraph, with its mathematics in ``\\(...\\)``."""

    def markdown(match: re.Match[str]) -> str:
        found = match[0]
        if match["mathematics"]:
            return f"\\({_latex(_tokens(match['mathematics'])).strip()}\\)"
        if match["special"]:
            if found == MARK:
                raise ValueError(f"mathematics starts with {MARK} and does not end: {text}")
            return "&lt;" if found == "<" else f"\\{found}"
        return f"`{match['code'] or match['name'] or found}`"

    return PROSE.sub(markdown, text)


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    before = ""
    for match in TOKEN.finditer(text):
        kind, value = str(match.lastgroup), match[0]
        if kind == "space":
            before += value
            continue
        if value in "<>" and kind == "op":
            tight_right = not text[match.end() : match.end() + 1].isspace()
            opens = tight_right and (before or not found or found[-1].text in PAIRS)
            if value == "<" and opens and ">" in text[match.end() :]:
                value = "langle"
            elif value == ">" and not before and any(t.text == "langle" for t in found):
                value = "rangle"
        found.append(Token(kind, value, before))
        before = ""
    return found


def _differential(name: str) -> str | None:
    """The LaTeX of dA, gX, dx, gVh: a tangent or cotangent by the name of its variable; None for other names."""
    kind, of = name[:1], name[1:]
    if kind not in ("d", "g", "h") or kind == "h" and not of.isupper():
        return None
    if re.fullmatch(r"[A-Z]h", of):
        of = f"{of[0]}^H"
    elif of in GREEK:
        of = GREEK[of].strip()
    elif len(of) > 1 and kind == "d":
        of = _differential(of) or ""
    elif len(of) != 1:
        return None
    return None if not of else rf"\mathrm{{d}}{of}" if kind == "d" else f"{kind}_{{{of}}}"


def _latex(tokens: list[Token]) -> str:
    return _pieces(tokens, 0, None)[0]


def _pieces(tokens: list[Token], i: int, closing: str | None) -> tuple[str, int]:
    """The LaTeX up to a closing bracket; factors between which there is a space keep a thin one."""
    out: list[str] = []
    while i < len(tokens) and tokens[i].text != closing:
        factors = i > 0 and tokens[i].before and _is_factor(tokens[i - 1], ")]") and _is_factor(tokens[i], "([")
        piece, i = _piece(tokens, i)
        out.append(rf"\, {piece}" if factors and out else piece)
    return " ".join(out), i


def _is_factor(token: Token, brackets: str) -> bool:
    if token.text in FUNCTIONS:
        return False
    return token.kind in ("name", "number", "long") or token.text in brackets or token.text in ("langle", "rangle")


def _piece(tokens: list[Token], i: int) -> tuple[str, int]:
    """The LaTeX of the atom at ``i`` with its sub- and superscripts, and where the next one starts."""
    token = tokens[i]
    if token.text in ("^", "_"):  # without a base
        return "", i + 1
    if token.text in ("sqrt", "conj") and i + 1 < len(tokens) and tokens[i + 1].text == "(":
        inside, i = _group(tokens, i + 1)
        command = "sqrt" if token.text == "sqrt" else "overline"
        base = rf"\{command}{{{_without_brackets(inside)}}}"
    elif token.text in PAIRS:
        base, i = _group(tokens, i)
    else:
        base, i = _atom(token), i + 1
    scripts: dict[str, str] = {}
    while i < len(tokens) and tokens[i].text in ("^", "_", "'", "~"):
        mark = tokens[i].text
        if mark == "~":
            base, i = rf"\tilde{{{base}}}", i + 1
            continue
        if mark == "'":
            scripts["^"] = r"\prime " + scripts.get("^", "")
            i += 1
            continue
        follows = tokens[i + 1] if i + 1 < len(tokens) else None
        if mark == "^" and (follows is None or follows.before or follows.text in (",", ")", "/", "rangle")):
            base, i = rf"\hat{{{base}}}", i + 1
            continue
        script, i = _script(tokens, i + 1)
        scripts[mark] = scripts.get(mark, "") + script
    if scripts and not re.fullmatch(r"\w|\\[a-zA-Z]+ ?|\\operatorname\{\w+\}", base):
        base = f"{{{base}}}"
    return base + "".join(f"{mark}{{{scripts[mark]}}}" for mark in ("_", "^") if mark in scripts), i


def _script(tokens: list[Token], i: int) -> tuple[str, int]:
    sign = ""
    while i < len(tokens) and tokens[i].text in ("-", "+"):
        sign, i = sign + tokens[i].text, i + 1
    if i >= len(tokens):
        return sign, i
    if tokens[i].text == "(":
        inside, i = _group(tokens, i)
        return sign + _without_brackets(inside), i
    return sign + _atom(tokens[i]), i + 1


def _without_brackets(group: str) -> str:
    return group[1:-1] if group.endswith(")") else group


def _group(tokens: list[Token], i: int) -> tuple[str, int]:
    """A group with its brackets; up to the end if none closes it."""
    opening = tokens[i]
    inside, i = _pieces(tokens, i + 1, PAIRS[opening.text])
    return f"{_atom(opening)} {inside} {_atom(tokens[i]) if i < len(tokens) else ''}".rstrip(), i + 1


def _atom(token: Token) -> str:
    text = token.text
    if text in GREEK:
        return GREEK[text] + " "
    if text in SYMBOLS:
        return SYMBOLS[text]
    if text == "." and token.before:
        return r"\cdot "
    if token.kind == "number" and "e" in text:
        mantissa, _, exponent = text.partition("e")
        return ("" if mantissa == "1" else rf"{mantissa} \cdot ") + f"10^{{{exponent}}}"
    if re.fullmatch(r"[A-Za-z]\d", text):
        return f"{text[0]}_{text[1]}"
    if text == "sum":
        return r"\sum "
    if text == "prod":
        return r"\prod "
    if text in FUNCTIONS:
        return rf"\operatorname{{{text.replace('_', ' ')}}}"
    if token.kind == "long":
        first, _, rest = text.partition("_")
        return rf"\text{{{first}}}_{{\text{{{rest.replace('_', ' ')}}}}}"
    if latex := _differential(text):
        return latex
    if token.kind == "name" and len(text) > 1:
        return rf"\text{{{text}}}"
    return text
