"""Which passwords are refused: short ones, the commonest, and those that say the user's name.

Length is what keeps a password from being guessed. Rules about capitals and digits make people
choose `Password123!`, and are not here.
"""

import unicodedata

LENGTH_MIN = 12
LENGTH_MAX = 256

# The commonest of twelve and more, and what the shorter ones become when they are drawn out.
_COMMONEST = """
    123456789012 1234567890123 12345678901234 123456789123 123123123123 123412341234
    987654321098 121212121212 1q2w3e4r5t6y 1qaz2wsx3edc 1qaz2wsx3edc4rfv q1w2e3r4t5y6
    qwertyuiop12 qwertyuiop123 qwertyuiop[] qwertyuiopasdfghjkl qwertyqwerty qwerty123456
    qwerty1234567 qwerty12345678 asdfghjkl123 asdfghjklzxcvbnm zxcvbnm12345 abcdefghijkl
    abcdefghijklmnop abcd12345678 abc123abc123 abc123456789 a1b2c3d4e5f6 password1234
    password12345 password123456 passwordpassword password1password mypassword123 newpassword12
    changemechangeme changeme1234 changeme12345 letmeinletmein letmein12345 iloveyou1234
    iloveyouiloveyou welcome12345 welcome123456 administrator administrator1 adminadminadmin
    admin1234567 admin12345678 administrator123 rootrootroot testtesttest test12345678
    football1234 baseball1234 basketball12 liverpool123 manchester12 trustno1trustno1
    sunshine1234 princess1234 dragon123456 monkey123456 master123456 superman1234 batman123456
    p@ssw0rd1234 p@ssword1234 p@55w0rd1234 correcthorsebatterystaple headworks123 headworks1234
    headworksheadworks secretsecret secret123456 companyname123 spring2024spring summer2024summer
"""
COMMONEST = frozenset(_COMMONEST.split())


def normal(password: str) -> str:
    """The same text however a keyboard spells it (NFKC)."""
    return unicodedata.normalize("NFKC", password)


def weakness(password: str, *, email: str, name: str) -> str | None:
    """Why a new password is refused, as a sentence; None for one that will do."""
    text = normal(password)
    folded = text.casefold()
    if len(text) < LENGTH_MIN:
        return f"a password has at least {LENGTH_MIN} characters; a few words are easy to keep"
    if len(text) > LENGTH_MAX:
        return f"a password has at most {LENGTH_MAX} characters"
    if folded in COMMONEST or _repeats(folded):
        return "this is one of the first passwords that anybody would try"
    own = {_strip(part.casefold()) for part in (email, email.partition("@")[0], name)} - {""}
    if _strip(folded) in own:
        return "a password is not one's own name"
    return None


def _repeats(text: str) -> bool:
    """Whether it is one to four characters, over and over."""
    return any(text == (text[:n] * len(text))[: len(text)] for n in range(1, 5))


def _strip(text: str) -> str:
    """Without what people put around a name to make it longer."""
    return "".join(c for c in text if c.isalpha())
