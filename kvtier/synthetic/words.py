"""Word lists of the recall language; their order fixes the token ids of the demo model."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIALS = ("<pad>", "<bos>", "<eot>", "<user>", "<assistant>", "<tool>", "<unk>")
FULL_STOP = "."

ADJECTIVES = _words(
    """
    amber bold brisk calm clever coral crimson curly dusty eager fancy gentle golden happy
    hollow icy
    jolly keen lively lucky mellow misty noble proud quiet rapid rusty shiny silver tidy vivid
    witty
    """
)

NOUNS = _words(
    """
    badger beaver bison camel cobra condor crane dingo eagle falcon ferret fox gecko heron ibis
    jackal
    koala lemur llama lynx marten moose newt otter owl panda puffin raven seal tapir walrus zebra
    """
)

CODES = tuple(f"k{number:02d}" for number in range(64))

FILLER = _words(
    """
    about above across after again air all along also always among and another answer any apple
    around
    autumn away back bank barn basket beach bell below bench beside best bird boat book both
    bottle box
    branch bread bridge bright bring broad brother build busy but butter cabin candle carry
    castle chair
    cheese child church circle city clear climb clock cloth cloud coast cold color common cook
    cool copper
    corn corner country cover cross cup dance dark day deep desk dinner distant door draw dream
    drink dry
    each early earth east edge empty evening every far farm father feather fence field fire
    first fish floor
    flower follow forest fresh friend fruit full garden gate glass grass green ground grow hall
    hand harbor
    hat hear heavy hill hold home honey horse hour house idea inside island join journey jump
    key kitchen
    ladder lake lamp land large late laugh leaf learn letter light line listen little long low
    market meadow
    meal middle milk mill mirror moon morning mother mountain music narrow near never new night
    north note
    oak ocean often old open orange other outside over paint paper park past path pear pencil
    people picture
    piece plain plant plate play pond quick rain reach read rest rice ring rise river road rock
    roof room
    rope round sail salt sand school sea season seed shade shape sheep ship shore short simple
    sing sister
    sky sleep slow small smoke snow soft song south spring square stair star station stone storm
    story street
    summer
    """
)
