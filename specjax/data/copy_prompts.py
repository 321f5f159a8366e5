"""Prompts with answers that copy much of the prompt, written for specjax.

Twelve prompts rename a variable in a function, twelve summarise a short text
and quote its key sentence, and twelve ask a question about a text and request a
quote. The answers are easy to draft, because they are mostly copies.
"""

# Triples of the old name, the new name and the function.
_RENAMES = (
    ("total", "subtotal", '''\
def price_of(basket, prices):
    total = 0
    for item, count in basket.items():
        if item not in prices:
            raise KeyError(f"no price for {item}")
        total += count * prices[item]
    if total > 100:
        total -= 5
    return round(total, 2)
'''),
    ("d", "distances", '''\
def shortest_paths(graph, start):
    d = {start: 0}
    queue = [start]
    while queue:
        node = queue.pop(0)
        for neighbour in graph[node]:
            if neighbour not in d:
                d[neighbour] = d[node] + 1
                queue.append(neighbour)
    return d
'''),
    ("res", "words_by_length", '''\
def group_by_length(text):
    res = {}
    for word in text.split():
        word = word.strip(".,;:!?").lower()
        if not word:
            continue
        if len(word) not in res:
            res[len(word)] = []
        res[len(word)].append(word)
    return res
'''),
    ("lo", "left", '''\
def first_at_least(numbers, bound):
    """The index of the first sorted number that is not below the bound."""
    lo, hi = 0, len(numbers)
    while lo < hi:
        middle = (lo + hi) // 2
        if numbers[middle] < bound:
            lo = middle + 1
        else:
            hi = middle
    return lo
'''),
    ("m", "matrix", '''\
def transpose(m):
    if not m:
        return []
    width = len(m[0])
    for row in m:
        if len(row) != width:
            raise ValueError("the rows of m have different lengths")
    return [[m[i][j] for i in range(len(m))] for j in range(width)]
'''),
    ("s", "seconds", '''\
def format_duration(s):
    if s < 0:
        return "-" + format_duration(-s)
    hours = s // 3600
    s -= 3600 * hours
    minutes = s // 60
    s -= 60 * minutes
    return f"{hours:02d}:{minutes:02d}:{s:02d}"
'''),
    ("acc", "balance", '''\
def statement(bookings, acc=0):
    lines = []
    for date, amount, purpose in bookings:
        acc += amount
        sign = "+" if amount >= 0 else "-"
        lines.append(f"{date} {sign}{abs(amount):8.2f} {acc:9.2f} {purpose}")
        if acc < 0:
            lines.append(f"{date} the account is overdrawn by {-acc:.2f}")
    return lines
'''),
    ("cfg", "settings", '''\
def read_settings(path, defaults):
    cfg = dict(defaults)
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition("=")
            if key.strip() not in cfg:
                raise ValueError(f"unknown setting {key.strip()}")
            cfg[key.strip()] = value.strip()
    return cfg
'''),
    ("p", "candidate", '''\
def primes_below(limit):
    found = []
    for p in range(2, limit):
        for prime in found:
            if prime * prime > p:
                found.append(p)
                break
            if p % prime == 0:
                break
        else:
            found.append(p)
    return found
'''),
    ("node", "cell", '''\
class Stack:
    def __init__(self):
        self.top = None
        self.size = 0

    def push(self, value):
        node = {"value": value, "below": self.top}
        self.top = node
        self.size += 1

    def pop(self):
        if self.top is None:
            raise IndexError("the stack is empty")
        node = self.top
        self.top = node["below"]
        self.size -= 1
        return node["value"]
'''),
    ("t", "temperature", '''\
def classify(readings):
    names = []
    for t in readings:
        if t is None:
            names.append("missing")
        elif t < 0:
            names.append("frost")
        elif t < 15:
            names.append("cool")
        elif t < 25:
            names.append("mild")
        else:
            names.append("hot")
    return names
'''),
    ("n", "remaining", '''\
def to_roman(n):
    numerals = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"),
                (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
                (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    text = ""
    for value, letters in numerals:
        while n >= value:
            text += letters
            n -= value
    return text
'''),
)

_TEXTS = (
    "The old ferry stopped at noon. For forty years it had carried farmers and "
    "schoolchildren over the river, and its captain knew most of them by name. "
    "The new bridge, two miles upstream, takes a car across in a minute. Yet "
    "those who live at the landing have lost more than they gained, as none of "
    "them owns a car and the nearest bus leaves from the other side. The "
    "council has promised to look at the matter in spring.",
    "Bread dough rises because yeast eats sugar and gives off gas. If the "
    "kitchen is cold, the yeast works slowly and the dough may need a whole "
    "night. Many bakers see this as a fault and put the bowl on a heater. A "
    "slow rise is not a fault at all, for the flavour of bread comes from the "
    "acids that form during the long hours. Whoever has the time should let "
    "the dough rest in the cellar and bake it in the morning.",
    "Our library lends more than books. Since last year a visitor can borrow a "
    "drill, a sewing machine or a telescope for two weeks. The telescope is "
    "booked out until August. The librarians were afraid that tools would come "
    "back broken, but of three hundred loans only two ended with a repair. "
    "Other towns have asked for the rules and the price list, which fit on a "
    "single page.",
    "A glacier is a river that moves very slowly. Snow falls on its upper end, "
    "is pressed into ice and creeps downhill by its own weight. At the lower "
    "end the ice melts. Whether a glacier grows or shrinks depends only on "
    "which of the two is faster, the snow above or the melting below. In the "
    "valley we measured, the melting has been faster in every year since 1986, "
    "and the tongue of the glacier has drawn back by nine hundred metres.",
    "The team had planned to replace the whole program in one weekend. On "
    "Friday evening they copied the data, and on Saturday the first users "
    "complained that their invoices were gone. Nothing was lost, but the new "
    "program sorted them under another year. The lesson that the team drew is "
    "to move one customer first and all the others a month later. They have "
    "kept to it ever since, and no weekend has been spoiled again.",
    "Bees tell each other where flowers are by dancing. A bee that has found a "
    "rich meadow returns to the hive and walks in the figure of an eight. The "
    "direction of the middle line shows the direction of the meadow, measured "
    "from the sun, and the length of the dance shows how far it is. Other bees "
    "follow the dancer in the dark and feel the movement with their antennae. "
    "Then they fly out and find the place at the first attempt.",
    "The orchestra will play in the market hall this winter, since its own "
    "house is being repaired. The hall has a low ceiling and a stone floor, "
    "and the first rehearsal was so loud that the flutes could not be heard. "
    "An engineer hung forty woollen blankets from the beams. The blankets cost "
    "less than one evening's tickets and they solved the problem completely. "
    "The musicians now ask whether they may keep them.",
    "Children learn to read at very different ages. Some begin at four, others "
    "at eight, and by the age of twelve nobody can tell who was early. What "
    "matters far more than the age is whether somebody reads to them every "
    "day. A study of two thousand families found that a quarter of an hour is "
    "enough. The books need not be good ones, and it does no harm to read the "
    "same story thirty times.",
    "The harbour master keeps a list of every ship that has entered since "
    "1871. The early entries are in ink and give the name of the captain, the "
    "cargo and the wind. Later ones leave out the wind. A student who copied "
    "the list into a table noticed that storms can be read from it, because on "
    "some days no ship came in at all. Her table now helps to date floods for "
    "which no other record is left.",
    "We tried three ways to keep deer out of the orchard. A low fence did not "
    "stop them, and a radio that played all night stopped them for a week. The "
    "third way was to plant a strip of oats outside the fence. The deer eat "
    "the oats and leave the trees alone, which costs us one sack of seed a "
    "year. Our neighbour laughed at first and has planted two strips himself.",
    "A map always leaves something out. A map of roads leaves out the hills, "
    "and a map of hills leaves out the names of streets. If it showed "
    "everything, it would be as large as the land and of no use to anyone. The "
    "art of making a map is to decide what its reader will not need. The best "
    "map of our city shows nothing but stairs, and it was made for people who "
    "deliver parcels by bicycle.",
    "The clock in the tower was wrong for eleven years. It lost four minutes a "
    "week, and every Monday the caretaker climbed up and set it right. When he "
    "retired, the school asked a watchmaker to look at it. The watchmaker "
    "found a coin that somebody had laid on the pendulum to make it run more "
    "slowly. He took it away, and the clock has been right to the second. "
    "Nobody knows who had put the coin there, or why.",
)

# One question about each text in `_TEXTS`.
_QUESTIONS = (
    "Why have the people at the landing lost more than they gained?",
    "Where does the flavour of bread come from?",
    "How many of the tools that were lent came back broken?",
    "On what does it depend whether a glacier grows or shrinks?",
    "What had happened to the invoices that users missed?",
    "How does a bee show how far away a meadow is?",
    "How did the engineer make the market hall quieter?",
    "What matters more than the age at which a child begins to read?",
    "How can storms be read from the harbour master's list?",
    "What keeps the deer away from the trees, and what does it cost?",
    "Why would a map that showed everything be of no use?",
    "What had made the clock run slowly?",
)

RENAME = tuple(
    f"Rename the variable `{old}` to `{new}` in this code and change nothing "
    f"else:\n\n```python\n{code}```" for old, new, code in _RENAMES)
SUMMARISE = tuple(
    "Summarise this text in one sentence, and then quote its key sentence "
    f"word for word:\n\n{text}" for text in _TEXTS)
QUESTIONS = tuple(
    "Read this text and answer the question below it in one sentence. Then "
    "quote word for word all sentences of the text that say so, and those "
    f"beside them.\n\n{text}\n\n{question}"
    for text, question in zip(_TEXTS, _QUESTIONS, strict=True))
PROMPTS = RENAME + SUMMARISE
