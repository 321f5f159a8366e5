"""Automata over characters for strings and numbers of a JSON schema.

Supported formats and their standards:

  date, time, date-time  RFC 3339, with leap years, the correct number of days
                         in each month, and offsets. Years start at 0001. T and
                         Z are capitals. Leap seconds are not accepted.
  email                  RFC 5321 without IPv6 literals and without the length
                         limit of the entire domain. A quoted local part has at
                         most 31 characters.
  uri                    RFC 3986, with a scheme.
  uuid                   RFC 4122, in upper or lower case.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import decimal
import functools
from typing import Any

from specjax.constraints import characters
from specjax.constraints import regexes

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = ("([0-9]{2}(0[48]|[2468][048]|[13579][26])|"
         "(0[48]|[2468][048]|[13579][26])00)")
_DATE = (f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|"
         "(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|"
         f"{_LEAP}-02-29)")
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_CLOCK})"
_HEX = "[0-9a-fA-F]"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = (rf"({_ATOM}+(\.{_ATOM}+)*|"
          r'"([ !#-\[\]-~]|\\[ -~]){0,31}")'
          rf"@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])")
_LOCAL = r"""(?s:"|[^"@]{1,64}@).*"""  # length limit of an unquoted local part
_WORD = f"{_HEX}{{1,4}}"
_LAST = f"({_WORD}:{_WORD}|{_IPV4})"


def _ipv6() -> str:
  """Returns an expression of the nine IPv6 forms of RFC 3986.

  The forms differ in the number of groups around `::`.
  """
  forms = [f"({_WORD}:){{6}}{_LAST}", f"::({_WORD}:){{5}}{_LAST}"]
  for before, after in enumerate(range(4, -1, -1)):
    start = f"(({_WORD}:){{0,{before}}}{_WORD})?"
    forms.append(f"{start}::({_WORD}:){{{after}}}{_LAST}")
  forms += [f"(({_WORD}:){{0,5}}{_WORD})?::{_WORD}",
            f"(({_WORD}:){{0,6}}{_WORD})?::"]
  return "|".join(forms)


_PLAIN = r"A-Za-z0-9._~!$&'()*+,;=\-"
_CODED = f"%{_HEX}{{2}}"
_PCHAR = f"([{_PLAIN}:@]|{_CODED})"
_AUTHORITY = (rf"(([{_PLAIN}:]|{_CODED})*@)?"
              rf"(\[({_ipv6()}|v{_HEX}+\.[{_PLAIN}:]+)\]|"
              rf"([{_PLAIN}]|{_CODED})*)(:[0-9]*)?")
_URI = (rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_AUTHORITY}(/{_PCHAR}*)*|"
        rf"/({_PCHAR}+(/{_PCHAR}*)*)?|{_PCHAR}+(/{_PCHAR}*)*|)"
        rf"(\?({_PCHAR}|[/?])*)?(\#({_PCHAR}|[/?])*)?")
_FORMATS = {
    "date": (_DATE,), "time": (_TIME,), "date-time": (f"{_DATE}T{_TIME}",),
    "email": (_EMAIL, _LOCAL), "uri": (_URI,),
    "uuid": (f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",)}
_INTEGER = "-?(0|[1-9][0-9]*)"
_DIGITS = 15  # decimal digits that a double represents uniquely


def string_automaton(patterns: tuple[str, ...], formats: tuple[str, ...]
                     ) -> characters.Characters:
  """Returns the automaton of strings that match all patterns and formats.

  Raises:
    ValueError: a format is unknown, or a pattern is not a regular expression.
  """
  found = characters.anything()
  for pattern in patterns:
    try:
      one = regexes.compiled(pattern, search=True)
    except ValueError as e:
      raise ValueError(f"{e} ('pattern' of the JSON schema)") from None
    if not characters.counted(one, 0, None):
      raise ValueError(f"no string matches {regexes.shown(pattern)}, 'pattern' "
                       "of the JSON schema; are its ^ and $ at its ends?")
    found = characters.intersected(found, one)
  for name in formats:
    if name not in _FORMATS:
      raise ValueError(f"the JSON schema has the format {name!r}; the known "
                       f"formats are {', '.join(_FORMATS)}")
    found = characters.intersected(found, _format(name))
  return found


@functools.cache
def _format(name: str) -> characters.Characters:
  return functools.reduce(characters.intersected, (
      regexes.compiled(x, search=False) for x in _FORMATS[name]))


def number_automaton(limits: Mapping[str, Any], integer: bool
                     ) -> characters.Characters:
  """Returns the automaton of the numbers within bounds.

  Bounded numbers have no exponent. A bounded number with a point has a limited
  number of digits, so that a parser does not round it onto a bound.

  Args:
    limits: keywords of a JSON schema that bound a number, with their values.
    integer: if True, numbers have no point and no exponent.
  """
  bounds = {key: decimal.Decimal(repr(x)) for key, x in limits.items()
            if key in ("minimum", "maximum", "exclusiveMinimum",
                       "exclusiveMaximum")}
  if integer:
    kind = _INTEGER
  elif not bounds:
    kind = rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
  else:
    kind = "|".join([_INTEGER, *(
        rf"-?(0|[1-9][0-9]{{0,{n - 1}}})\.[0-9]{{1,{_DIGITS - n}}}"
        for n in range(1, _DIGITS)), r"-?([1-9][0-9]{14}|[1-8][0-9]{15})\.0"])
  found = regexes.compiled(kind, search=False)
  for key, bound in bounds.items():
    found = characters.intersected(found, regexes.compiled(
        _bounded(bound, "inimum" in key, "exclusive" in key), search=False))
  return found


def _bounded(bound: decimal.Decimal, is_least: bool, strict: bool) -> str:
  """Returns a regular expression of the decimals on one side of a bound.

  The expression may also match strings that are not JSON numbers.

  Args:
    bound: the bound.
    is_least: True for decimals above the bound, False for decimals below it.
    strict: if True, the bound itself is excluded.
  """
  away = ">" if is_least else "<"
  if bound == 0:
    zero = r"-?0(\.0*)?"
    other = r"[0-9]+(\.[0-9]*)?"
    nonzero = r"([0-9]*[1-9][0-9]*(\.[0-9]*)?|[0-9]+\.[0-9]*[1-9][0-9]*)"
    signed = nonzero if is_least else f"-{nonzero}"
    if strict:
      return signed
    return f"{signed}|{zero}|{other}" if is_least else f"{signed}|{zero}"
  positive = bound > 0
  magnitude = _beyond(abs(bound), (away == ">") == positive, strict)
  sign = "" if positive else "-"
  if is_least != positive:  # all numbers of the other sign are within the bound
    other = rf"{'-' if positive else ''}[0-9]+(\.[0-9]*)?"
    return rf"{sign}({magnitude})|{other}|-0(\.0*)?"
  return f"{sign}({magnitude})"


def _beyond(bound: decimal.Decimal, above: bool, strict: bool) -> str:
  """Returns a regular expression of unsigned decimals beyond a positive bound.

  Args:
    bound: the bound.
    above: True for decimals above the bound, False for decimals below it.
    strict: if True, the bound itself is excluded.
  """
  whole, _, part = format(bound, "f").partition(".")
  part = part.rstrip("0")
  any_part = r"(\.[0-9]*)?"
  forms = []
  # Numbers whose integer part differs from that of the bound: in its number of
  # digits, or in a digit.
  if above:
    forms.append(f"[1-9][0-9]{{{len(whole)},}}{any_part}")
  elif len(whole) > 1:
    forms.append(f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){any_part}")
  for i, start in _differing(whole, above):
    forms.append(f"{start}[0-9]{{{len(whole) - i - 1}}}{any_part}")
  # Numbers whose integer part equals that of the bound.
  for _, start in _differing(part, above):
    forms.append(rf"{whole}\.{start}[0-9]*")
  if above:
    forms.append(rf"{whole}\.{part}[0-9]*[1-9][0-9]*")
  elif part:
    forms += [rf"{whole}\.?", *(rf"{whole}\.{part[:i]}"
                                for i in range(1, len(part)))]
  if not strict:
    forms.append(rf"{whole}\.{part}0*" if part else rf"{whole}(\.0*)?")
  return "|".join(forms)


def _differing(digits: str, above: bool) -> Iterator[tuple[int, str]]:
  """Yields prefixes of numbers that differ from a bound only in the last digit.

  Args:
    digits: digits of the bound.
    above: if True, the last digit of the prefix is larger than the same digit
      of the bound. If False, it is smaller.

  Yields:
    Index of the last digit, and a regular expression of the prefix.
  """
  for i, digit in enumerate(map(int, digits)):
    low, high = (digit + 1, 9) if above else (0, digit - 1)
    if low <= high:
      yield i, f"{digits[:i]}[{low}-{high}]"
