r"""Words of other languages around mathematics, in English: x=2 oder x=3, 无解, Ответ: 5, 12个.

Only words that do not depend on their context are translated: "or" and "and" between values, yes
and no, "no solution", announcements of an answer, and counted or measured things after a number.
"""

import re

from jzero.answers.vocabulary import inverted

_OR, _AND = r" \text{ or } ", r" \text{ and } "
_WORDS = inverted(
    {
        "yes": "ja oui sí si да 是 是的 はい 예",
        "no": "nein нет 否 不是 いいえ 아니요",
        "even": "偶数 gerade pair par чётное",
        "odd": "奇数 ungerade impair impar нечётное",
        "isosceles triangle": "等腰三角形",
        "right triangle": "直角三角形",
        "equilateral triangle": "等边三角形 正三角形",
        "true": "wahr vrai verdadero vero верно истина 对 对的 正确 正しい",
        "infinitely many": "unendlichviele infinitamentemuchas infinitamentemuitas uneinfinité"
        " infinitésde бесконечномного 无穷多 无穷多个 无限多 無限個 無数",
        "false": "falsch faux falso неверно ложь 错 错误 不正确",
    }
)
_NO_SOLUTION = re.compile(
    r"keine\s+(?:reelle\s+)?lösung(?:en)?|es\s+gibt\s+keine\s+lösung|нет\s+решени[йя]|решений\s+нет"
    r"|no\s+hay\s+soluci(?:ón|ones)|no\s+tiene\s+solución|sin\s+solución|(?:pas\s+de|aucune)\s+solution"
    r"|nessuna\s+soluzione|nenhuma\s+solução|无解|無解|没有解|解なし|해가\s*없다",
    re.IGNORECASE,
)
# Sets in words. Without "real", all numbers are real numbers.
_SETS = [
    (re.compile(pattern, re.IGNORECASE), notation)
    for pattern, notation in (
        (
            r"(?:x(?:为|是))?(?:所有|全体|任意|一切)的?实数|实数集?|すべての実数|全ての実数|모든\s*실수"
            r"|(?:alle|die|menge der)\s+reellen?\s+zahlen|(?:todos\s+)?(?:los\s+)?"
            r"(?:números\s+)?reales"
            r"|(?:tous\s+)?les\s+(?:nombres\s+)?réels|tutti\s+i\s+(?:numeri\s+)?reali"
            r"|todos\s+os\s+(?:números\s+)?reais|(?:все|множество)\s+(?:действительны|вещественны)[ех]\s+чис(?:ла|ел)",
            r"\mathbb{R}",
        ),
        (
            r"(?:所有|全体|任意)的?整数|すべての整数|모든\s*정수|(?:alle|die)\s+ganzen\s+zahlen"
            r"|todos\s+los\s+(?:números\s+)?enteros|tous\s+les\s+entiers|все\s+целые\s+числа",
            r"\mathbb{Z}",
        ),
        (
            r"空集|空集合|공집합|(?:die\s+)?leere\s+menge|(?:el\s+)?conjunto\s+vac[ií]o|(?:l')?ensemble\s+vide"
            r"|insieme\s+vuoto|conjunto\s+vazio|пустое\s+множество",
            r"\emptyset",
        ),
        (
            r"不存在|存在しない|не\s+существует|no\s+existe|n'existe\s+pas|existiert\s+nicht",
            r"\text{does not exist}",
        ),
    )
]
_ANNOUNCEMENT = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:(?:die\s+)?(?:antwort|lösung)(?:\s+(?:ist|lautet)|\s*[:：])"
    r"|(?:la\s+)?(?:réponse|solution)(?:\s+est|\s*[:：])|(?:la\s+)?(?:respuesta|solución)(?:\s+es|\s*[:：])"
    r"|(?:a\s+)?resposta(?:\s+é|\s*[:：])|(?:la\s+)?risposta(?:\s+è|\s*[:：])"
    r"|ответ\s*[:：—-]?|(?:最终)?答案?\s*(?:[:：]|是|为)|答え?\s*(?:[:：]|は)|정답\s*[:：은]|답\s*[:：은])"
    r"\s*(?P<closed>\})?\s*",
    re.IGNORECASE,
)
_CONNECTIVES = [
    (re.compile(pattern, re.IGNORECASE), connective)
    for pattern, connective in (
        (
            r"\\text\s*\{\s*(?:oder|ou|или|o\s+bien)\s*\}|\\text\s*\{\s+o\s+\}|(?<=\s)(?:oder|или)(?=\s)|或者?",
            _OR,
        ),
        (
            r"\\text\s*\{\s*(?:und|et)\s*\}|\\text\s*\{\s+[yeи]\s+\}|(?<=\s)(?:und|и)(?=\s)|[和与且及]",
            _AND,
        ),
        ("[、，]", ", "),
    )
]
_MAY_BE_FOREIGN = re.compile(r"[^\x00-\x7f]|\\text|[A-Za-z]{3}|\A\s*[A-Za-z]{2}[\s.]*\Z")
# Things after a number.
_UNITS = inverted(
    {
        "cm": "厘米 см",
        "m": "米 м mètres mètre metros metri",
        "cm^2": "平方厘米 см²",
        "m^2": "平方米 м²",
        "m/s": "米/秒 м/с",
        "km": "千米 公里 км",
        "kg": "千克 公斤 кг",
        "g": "克 г",
        "percent": "prozent процентов процента pourcent",
        "units": "единиц единицы einheiten unités unidades unità 单位",
        "hours": "時間 小时 小時 часов часа час stunden stunde heures horas ore",
        "minutes": "分钟 分鐘 минут минуты minuten",
        "seconds": "秒 секунд sekunden secondes segundos",
        "days": "天 日 дней дня tage jours días giorni",
        "years": "年 岁 лет jahre années años anni",
        "degrees": "度 градусов grad degrés grados",
        "euros": "евро",
        "yuan": "元 块",
        "rubles": "рублей рубля руб",
        "people": "人 名 человек personen personnes personas",
        "pieces": "个 個 只 条 张 本 种 次 件 つ 枚 本 штук шт stück",
    }
)
# x大于12 is x > 12.
_COMPARED = (
    ("大于等于", "≥"),
    ("小于等于", "≤"),
    ("大于或等于", "≥"),
    ("小于或等于", "≤"),
    ("不等于", "≠"),
    ("大于", ">"),
    ("小于", "<"),
)
# 12个苹果 are 12 apples; not 12个以上, at least 12, and not 12个左右, about 12.
_COUNTED_IN_CHINESE = re.compile(
    r"(?P<number>[0-9])\s*(?:\\text\s*\{\s*)?[个個只条张本种次件枚名位辆棵]"
    r"(?![^\W\d_]*[以上下左右多少余约或不非和与到至])[\u4e00-\u9fff]{1,4}\s*\}?\s*[.。]?\s*\Z"
)
_COUNTED = re.compile(
    r"(?P<number>[0-9}])\s*(?:\\text\s*\{\s*)?(?P<word>[^\W\d_]+(?:/[^\W\d_]+)?)\s*\}?\s*[.。]?\s*\Z"
)
# 面积为5 is "the area is 5".
_NAMED_VALUE = re.compile(
    r"\s*(?:\$?[A-Za-z]\$?的)?(?![^0-9]*(?:大于|小于|超过|多于|少于))[\u4e00-\u9fff]{1,12}?"
    r"(?:为|是|等于|共有)\s*(?=[-0-9$\\])|\s*共有?\s*(?=[0-9])"
    # le maximum est 5
    r"|\s*(?:\\text\s*\{\s*)?(?:le|la|das|der|die|el|il)\s+[^\W\d_]{3,}\s+(?:est|ist|es|è)"
    r"\s*\}?\s*(?=[-0-9$\\])",
    re.IGNORECASE,
)


# x=3 (舍去 x=-1): another value is rejected.
_REJECTED = re.compile(
    r"(?<=[^\s(（{])\s*(?:\\text\s*\{)?\s*[（(]\s*(?:舍去|舍).{0,60}[）)]\s*\}?\s*\Z"
)
_NEGATING = frozenset("不非或否约近")  # "not", "no", "or" and "about"


def in_english(text: str) -> str:
    """Returns an answer with its foreign words in English; other answers unchanged."""
    if not _MAY_BE_FOREIGN.search(text):
        return text
    announcement = _ANNOUNCEMENT.match(text)
    if announcement is not None and text[announcement.end() :].strip(" }.。"):
        is_open = "\\text" in announcement[0] and not announcement["closed"]
        text = ("\\text{" if is_open else "") + text[announcement.end() :]
    named = _NAMED_VALUE.match(text)
    if named is not None and _NEGATING.isdisjoint(named[0]):
        text = text[named.end() :]
    text = _REJECTED.sub("", text)
    plain = re.sub(r"\\text\s*\{|[{}$.。]", " ", text).strip().lower()
    word = plain if plain in _WORDS else plain.replace(" ", "")
    if word in _WORDS:
        return rf"\text{{{_WORDS[word]}}}"
    if _NO_SOLUTION.fullmatch(plain):
        return r"\emptyset"
    for pattern, notation in _SETS:
        if pattern.fullmatch(plain):
            return notation
    for word, operator in _COMPARED:
        text = text.replace(word, operator)
    for pattern, connective in _CONNECTIVES:
        text = pattern.sub(lambda _, connective=connective: connective, text)
    text = _COUNTED_IN_CHINESE.sub(r"\g<number>", text)
    return _COUNTED.sub(_counted, text)


def _counted(match: re.Match[str]) -> str:
    unit = _UNITS.get(match["word"].lower())
    return match[0] if unit is None else rf"{match['number']}\text{{ {unit}}}"
