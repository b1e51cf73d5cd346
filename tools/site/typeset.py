"""The plain-text mathematics of docstrings, typeset: ``$gB = L^-H W$`` becomes Markdown with ``\\(g_{B} = L^{-H} W\\)``.

Docstrings are read in editors, so they have no LaTeX: mathematics is plain text between dollar signs. In a paragraph that has
no dollar sign, mathematics is guessed: single letters, numbers, operators and the names of functions. The guesser is
needed only until every docstring is marked; ``mark.py`` writes the marks where it guesses.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

__all__ = ["marked", "typeset"]

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
NAMESAKES = ("distribution", "function")  # after them no Greek letter: the beta distribution
FUNCTIONS = (
    "sum prod max min log exp sin cos tan sinh cosh tanh sec asin acos atan atan2 sqrt conj diag tr adj Re Im tril triu sign "
    "sgn norm mean erf erfc softmax softplus log_softmax det rank sym skew digamma floor round logsumexp var cumsum"
).split()
NOUNS = set("sum prod max min mean norm sign var rank det floor round".split())  # after "the", not mathematics
DETERMINERS = ("the", "a", "their", "its", "this", "each")
# Words of a sentence, also where a function has the name, or next to an operator.
WORDS = (
    "a an and as at be but by each else for from give gives given if in into is it its not of on or over that the their "
    "then these this those to where which with without all both do does has have no are was"
).split()
BINARY = {"+-", "+", "-", "*", "/", "=", "<", ">", "<=", ">=", "!=", "^", "->"}
SYMBOLS = {
    "<=": r"\le ",
    ">=": r"\ge ",
    "!=": r"\ne ",
    "->": r"\to ",
    "+-": r"\pm ",
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
TOKEN = re.compile(
    r"""(?P<code>``[^`]+``|`[^`]+`|\(\*(?:,\ [^()\s,]+)*\)|\b[a-z]{3,}[\w.]*_\w+\([^()]*\)|\b[A-Za-z]\w{2,}\.\w[\w.]*\w)
      | (?P<long>\bgrad_\w+|\b[A-Za-z]{3,}_\w{3,}\b)
      | (?P<word>[A-Za-z]{2,}(?:-[A-Za-z]{2,})+|[A-Za-z]+'s\b|(?<=\b[a-zA-Z])-[a-z]{2,}\b)
      | (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
      | (?P<name>[A-Za-z]\d(?![\w.])|[A-Za-z]\d(?=_)|atan2|[A-Za-z]+)
      | (?P<op>\|\||\+-|<=|>=|!=|->|\.\.\.|[-+*/^_=<>|()\[\]{},;'])
      | (?P<space>\s+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    kind: str
    text: str
    before: str  # the white space before it
    start: int = 0  # where it starts and ends in the text
    end: int = 0


MARK = "$"


def typeset(text: str) -> str:
    """Markdown of a paragraph, with its mathematics in ``\\(...\\)``."""
    text, marks = _without_marks(text)
    out = []
    for tokens, is_math in _runs(text, marks):
        if is_math:
            out.append(f"{tokens[0].before}\\({_latex(tokens).strip()}\\)")
        else:
            out += [token.before + _plain(token) for token in tokens]
    return "".join(out)


def marked(text: str) -> str:
    """The paragraph with a mark on each side of the mathematics that is guessed in it; unchanged if it has marks."""
    if MARK in text:
        return text
    out, position = [], 0
    for tokens, is_math in _runs(text, []):
        start, end = tokens[0].start, tokens[-1].end
        out += [text[position:start], MARK * is_math, text[start:end], MARK * is_math]
        position = end
    return "".join([*out, text[position:]])


def _without_marks(text: str) -> tuple[str, list[int]]:
    """The text without marks, and where in it mathematics starts and ends in turn."""
    pieces = text.split(MARK)
    if len(pieces) % 2 == 0:
        raise ValueError(f"mathematics starts with {MARK} and does not end: {text}")
    ends, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        ends.append(length)
    return "".join(pieces), ends


def _runs(text: str, marks: list[int]) -> Iterator[tuple[list[Token], bool]]:
    """Neighbouring tokens that are all mathematics, or all not: as marked, or guessed without marks."""
    tokens = _tokens(text)
    math = [bisect(marks, token.start) for token in tokens] if marks else _mathematical(tokens)
    # the number of marks before a token is odd inside of a run, and differs between runs
    for key, run in groupby(zip(tokens, math, strict=True), key=lambda pair: pair[1]):
        yield [token for token, _ in run], key % 2 == 1


def _tokens(text: str) -> list[Token]:
    found, before = [], ""
    for match in TOKEN.finditer(text):
        kind, value = str(match.lastgroup), match[0]
        if kind == "space":
            before += value
            continue
        if value in "<>" and kind == "op":
            tight_right = not text[match.end() : match.end() + 1].isspace()
            if value == "<" and tight_right and (before or not found) and ">" in text[match.end() :]:
                value = "langle"
            elif value == ">" and not before and any(t.text == "langle" for t in found):
                value = "rangle"
        found.append(Token(kind, value, before, match.start(), match.end()))
        before = ""
    return found


def _is_differential(name: str) -> bool:
    """dA, gX, dx, gVh: a tangent or cotangent by the name of its variable."""
    return bool(re.fullmatch(r"[dgh][A-Z]h?|d[abgpqstuvwxyzcr]|g[mrwxz]", name))


def _mathematical(tokens: list[Token]) -> list[bool]:
    """For each token whether it is mathematics."""
    math = [_is_atom(tokens, i) for i in range(len(tokens))]
    for i, token in enumerate(tokens):  # names next to an operator that is written between spaces: grad * mask
        if token.kind == "name" and not math[i] and token.text not in WORDS:
            left = i > 1 and tokens[i - 1].text in BINARY and _may_be_math(tokens, i - 2)
            right = i + 2 < len(tokens) and tokens[i + 1].text in BINARY and _may_be_math(tokens, i + 2)
            math[i] = left or right
    for _ in range(2):
        for i, token in enumerate(tokens):  # names that are mathematics next to mathematics: grad conj(w)
            if token.kind == "long" or token.text in ("grad", "ij", "sign", "inf"):
                called = i > 1 and tokens[i - 1].text == "(" and tokens[i - 2].text in FUNCTIONS
                left = i > 0 and (math[i - 1] or tokens[i - 1].text in BINARY | {"_"})
                right = i + 1 < len(tokens) and (math[i + 1] or tokens[i + 1].text in BINARY)
                math[i] = math[i] or called or left or right
        _brackets(tokens, math)
    for i, token in enumerate(tokens):
        if token.text in BINARY | {"_", "...", "'", "||", "|"}:
            left = i > 0 and (math[i - 1] or tokens[i - 1].text in ")]")
            right = i + 1 < len(tokens) and (math[i + 1] or tokens[i + 1].text in ("(", "[", "-", "|", "||", "langle"))
            math[i] = left or right if token.text != "'" else left and not token.before
    _brackets(tokens, math)
    for i, token in enumerate(tokens):  # a . b, the product of vectors
        if token.text == "." and token.before and 0 < i < len(tokens) - 1:
            math[i] = math[i - 1] and math[i + 1]
    _brackets(tokens, math)
    for i in reversed(range(len(tokens))):  # a function of nothing: "the log sum exp that is returned"
        if tokens[i].text in FUNCTIONS and math[i] and tokens[i].text != "sign":
            argument = i + 1 < len(tokens) and (math[i + 1] or tokens[i + 1].text in "([|^_")
            math[i] = argument or (i > 0 and tokens[i - 1].text in BINARY | {"|", "("})
    for i, token in enumerate(tokens):  # a sign without operands
        if token.text in BINARY and not (i and math[i - 1]) and not (i + 1 < len(tokens) and math[i + 1]):
            math[i] = False
    return math


def _may_be_math(tokens: list[Token], i: int) -> bool:
    return tokens[i].kind in ("name", "number", "long") and tokens[i].text not in WORDS or tokens[i].text in "()[]-|"


def _is_atom(tokens: list[Token], i: int) -> bool:
    token = tokens[i]
    following = tokens[i + 1] if i + 1 < len(tokens) else Token("end", "", "")
    if token.kind == "number":
        return True
    if token.kind != "name":
        return False
    before = tokens[i - 1].text if i else "."
    if len(token.text) == 1:
        if before == "_" or token.text not in "aA" or following.kind not in ("word", "name", "code"):
            return True
        starts = token.text == "A" and before in ".:"
        article = (token.text == "a" and following.text not in WORDS) or starts
        return not article or _is_math_name(following.text)
    if token.text in FUNCTIONS:
        if following.text in ("_", "^") or (following.text == "(" and not following.before):
            return True
        math_follows = following.text in ("(", "|", "langle") or _is_math_name(following.text)
        return math_follows and not (token.text in NOUNS and before in DETERMINERS)
    if following.text == "(" and not following.before and token.text not in WORDS:
        return before != "." or i == 0
    if token.text == "inf" or (token.text in GREEK and following.text in NAMESAKES):
        return False
    return bool(re.fullmatch(r"[A-Za-z]\d", token.text)) or token.text in GREEK or _is_differential(token.text)


def _is_math_name(text: str) -> bool:
    if len(text) == 1:
        return text.isalpha() and text != "a"
    return text in FUNCTIONS or text in GREEK or _is_differential(text)


def _brackets(tokens: list[Token], math: list[bool]) -> None:
    """Brackets around nothing but mathematics are mathematics, with the commas in them."""
    for opening, closing in PAIRS.items():
        stack = []
        for i, token in enumerate(tokens):
            if token.text == opening:
                stack.append(i)
            elif token.text == closing and stack:
                start = stack.pop()
                inside = range(start + 1, i)
                if inside and all(math[k] or tokens[k].text in (",", ";") or tokens[k].text in PAIRS for k in inside):
                    for k in range(start, i + 1):
                        math[k] = True


def _plain(token: Token) -> str:
    if token.kind == "code":
        return f"`{token.text.strip('`')}`"
    if token.kind == "long":
        return f"`{token.text}`"
    text = {"langle": "<", "rangle": ">"}.get(token.text, token.text)
    return re.sub(r"([\\*_\[\]<>|])", r"\\\1", text) if token.text != "<" else "&lt;"


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
    while i < len(tokens) and tokens[i].text in ("^", "_", "'"):
        mark = tokens[i].text
        if mark == "'":
            scripts["^"] = r"\prime " + scripts.get("^", "")
            i += 1
            continue
        follows = tokens[i + 1] if i + 1 < len(tokens) else None
        if mark == "^" and (follows is None or follows.before or follows.text in (",", ")", "/")):
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
    if token.kind == "long":
        first, _, rest = text.partition("_")
        return rf"\text{{{first}}}_{{\text{{{rest.replace('_', ' ')}}}}}"
    if re.fullmatch(r"[A-Za-z]\d", text):
        return f"{text[0]}_{text[1]}"
    if text == "sum":
        return r"\sum "
    if text == "prod":
        return r"\prod "
    if text in FUNCTIONS:
        return rf"\operatorname{{{text.replace('_', ' ')}}}"
    if _is_differential(text):
        rest = text[1:] if not text.endswith("h") or len(text) < 3 else rf"{text[1:-1]}^H"
        return rf"\mathrm{{d}}{rest}" if text[0] == "d" else rf"{text[0]}_{{{rest}}}"
    if token.kind == "name" and len(text) > 1:
        return rf"\text{{{text}}}"
    return text
