"""Names and things. The last tenth of every list appears in held-out problems only."""

from __future__ import annotations

from typing import NamedTuple


class Person(NamedTuple):
    """A name and its pronouns."""

    name: str
    he: str
    him: str
    his: str


WOMEN = """Anna Maria Lucy Emma Olivia Sophie Grace Nina Rosa Elena Clara Julia Hannah Zoe Alice Ruth Leah Mia Nora Ivy
Amy Bella Carmen Dana Edith Fiona Gina Helen Irene Jane Karen Laura Megan Naomi Paula Rachel Sarah Tina Ursula Vera
Wendy
Yara Amira Priya Mei Aisha Fatima Ines Lina Chloe Daisy Ella Freya Holly Isla Kate Lily Molly Penny Quinn Robin Stella
Tara Violet Ximena Yuki Zara Ada Beth Cora Dora Eva Faye Greta Hazel Iris Joan""".split()
MEN = """Adam Ben Carl David Eric Frank George Henry Ivan Jack Kevin Liam Mark Noah Oscar Peter Ray Sam Tom Victor Will
Alex Brian Chris Daniel Ethan Felix Gary Hugo Ian James Kyle Leo Max Nick Owen Paul Rob Simon Tim Andre Bruno Carlos
Diego Emil Finn Hassan Jamal Kofi Luis Mateo Omar Pablo Raj Sergio Theo Umar Wei Yusuf Zack Arthur Caleb Derek Elias
Fred Gus Harold Isaac Joel Kurt Louis Martin""".split()
PEOPLE = [
    person
    for woman, man in zip(WOMEN, MEN)
    for person in (Person(woman, "she", "her", "her"), Person(man, "he", "him", "his"))
]
RELATIVES = """brother;sister;friend;cousin;neighbor;uncle;aunt;grandmother;grandfather;teacher;classmate;mother;father;
best friend;roommate;coworker""".replace("\n", "").split(";")

COLLECTED = """marbles;stickers;stamps;coins;seashells;baseball cards;buttons;beads;toy cars;comic books;postcards;key
rings;bracelets;bottle caps;action figures;puzzles;plastic dinosaurs;crayons;pencils;erasers;markers;notebooks;ribbons;
pebbles;magnets;badges;trading cards;rubber bands;paper clips;model planes;building blocks;jigsaw pieces;balloons;pins;
hair clips;dolls;books;magazines;videos;posters;tokens;dice;feathers;fossils;bookmarks;paintbrushes;patches;tennis
balls;yo-yos;kites;glass figurines""".replace("\n", " ").split(";")
FOOD = """apples;oranges;bananas;pears;plums;peaches;cookies;muffins;cupcakes;candies;chocolates;lollipops;strawberries;
cherries;grapes;lemons;eggs;carrots;potatoes;tomatoes;onions;peppers;sandwiches;crackers;pretzels;walnuts;almonds;
doughnuts;brownies;bagels;mangoes;kiwis;apricots;figs;pancakes;rolls;mints;gumdrops;peanuts;radishes;raisins;dumplings;
tarts;waffles""".replace("\n", " ").split(";")
GOODS = """pen;notebook;book;shirt;hat;toy;mug;lamp;chair;plant;cake;sandwich;ticket;ball;bag;scarf;plate;candle;board
game;puzzle;poster;umbrella;towel;belt;kite;ruler;magazine;calendar;pillow;blanket;vase;backpack;water bottle;pair of
socks;pair of gloves;T-shirt;paint set;flashlight;wallet;necklace;bracelet;basket;jar of honey;box of tea;loaf of bread;
pizza;melon;bunch of flowers;dictionary;keychain;clock;broom;photo frame;teapot""".replace("\n", " ").split(";")
CHEAP = """pencil;eraser;cookie;apple;pear;candy bar;muffin;sticker;stamp;banana;bagel;bottle of juice;bottle of
water;pretzel;balloon;postcard;lemon;roll;egg;marble;button;cupcake;orange;envelope;doughnut;bookmark""".replace(
    "\n", " "
).split(";")
DEAR = """bicycle;guitar;phone;laptop;camera;tent;skateboard;jacket;television;desk;sofa;game console;sewing
machine;keyboard;violin;tablet;telescope;scooter;watch;coat;surfboard;drum kit;microscope;kayak""".replace(
    "\n", " "
).split(";")
BOXES = """box;bag;basket;jar;pack;crate;bowl;tray;carton;bucket;drawer;shelf;album;case;bundle;tin;sack;chest;packet;
container;bin""".replace("\n", " ").split(";")
ANIMALS = """cows;sheep;goats;chickens;ducks;horses;pigs;rabbits;geese;turkeys;ponies;donkeys;llamas;alpacas""".split(
    ";"
)
PLANTS = """roses;tulips;daisies;sunflowers;lilies;apple trees;oak trees;tomato plants;bean plants;pepper plants;pine
trees;bushes;marigolds;pansies;lettuces;cabbages;cherry trees;orchids;maple trees""".replace("\n", " ").split(";")
WORKERS = """gardener;painter;baker;carpenter;tailor;mechanic;waiter;cleaner;driver;plumber;cook;potter;electrician;
teacher;nurse;photographer;barber;builder;farmer;clerk;tutor;babysitter;mason;welder""".replace("\n", " ").split(";")
MADE = """chairs;toys;shirts;bricks;bottles;candles;baskets;pots;tables;lamps;bolts;hats;bags;tiles;boxes;masks;dolls;
screws;cakes;loaves of bread;pairs of shoes;bracelets;curtains;blankets;cups;kites;clocks;wheels""".replace(
    "\n", " "
).split(";")
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
COLORS = ["red", "blue", "green", "yellow", "white", "black", "purple", "orange", "pink", "brown", "gray", "silver"]
WHOLE = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}
FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth", 8: "an eighth", 10: "a tenth"}
EACH = {2: "half", 3: "one third", 4: "one fourth", 5: "one fifth", 6: "one sixth", 8: "one eighth", 10: "one tenth"}


def plural(thing: str) -> str:
    """The plural of a thing in the singular: "box of tea" -> "boxes of tea"."""
    head, of, rest = thing.partition(" of ")
    if head.endswith(("s", "x", "ch", "sh")):
        head += "es"
    elif head.endswith("y") and head[-2] not in "aeiou":
        head = head[:-1] + "ies"
    elif head.endswith(("shelf", "loaf")):
        head = head[:-1] + "ves"
    else:
        head += "s"
    return head + of + rest


def article(thing: str) -> str:
    """The thing with "a" or "an"."""
    return ("an " if thing[0] in "aeio" else "a ") + thing


# Of everyday stories -------------------------------------------------------------------------------------------------
THINGS = (*COLLECTED, *FOOD)
PRICED = tuple(plural(thing) for thing in (*CHEAP, *GOODS))
HOLDING = tuple((plural(box), box) for box in BOXES)
JOBS = (
    ("e-mails", "answer", "answered"),
    ("letters", "write", "written"),
    ("chairs", "paint", "painted"),
    ("shirts", "iron", "ironed"),
    ("fields", "plow", "plowed"),
    ("fences", "repair", "repaired"),
    ("bicycles", "fix", "fixed"),
    ("rooms", "clean", "cleaned"),
    ("essays", "mark", "marked"),
    ("hedges", "trim", "trimmed"),
    ("dogs", "walk", "walked"),
    ("cars", "wash", "washed"),
    ("cabinets", "build", "built"),
    ("pies", "bake", "baked"),
    ("lamps", "hang", "hung"),
    ("doors", "replace", "replaced"),
    ("scarves", "knit", "knitted"),
    ("songs", "practice", "practiced"),
)
EARNED = """babysitting;raking leaves;walking dogs;selling lemonade;washing cars;shoveling snow;tutoring;delivering
newspapers;painting fences;watering plants;selling cookies;cleaning garages""".replace("\n", " ").split(";")
POINTS = (
    ("coin", "coins", "collected", "round"),
    ("star", "stars", "caught", "level"),
    ("ring", "rings", "grabbed", "race"),
    ("flag", "flags", "captured", "stage"),
    ("goal", "goals", "scored", "half"),
    ("target", "targets", "hit", "round"),
    ("riddle", "riddles", "solved", "part"),
    ("basket", "baskets", "made", "quarter"),
)
CROWDS = (
    ("passengers", "bus", "got off", "got on"),
    ("guests", "hotel", "checked out", "checked in"),
    ("visitors", "museum", "went home", "came in"),
    ("shoppers", "store", "left", "walked in"),
    ("swimmers", "pool", "went home", "jumped in"),
    ("diners", "restaurant", "left", "sat down"),
    ("readers", "library", "left", "came in"),
    ("cars", "parking lot", "drove off", "drove in"),
    ("birds", "old oak", "flew away", "landed"),
    ("fans", "stadium", "left early", "came late"),
)
OWNED = (
    ("red marbles", "blue marbles", "marbles"),
    ("apple pies", "cherry pies", "pies"),
    ("daisies", "lilies", "flowers"),
    ("novels", "comic books", "books"),
    ("white eggs", "brown eggs", "eggs"),
    ("wooden blocks", "plastic blocks", "blocks"),
    ("plain bagels", "onion bagels", "bagels"),
    ("postcards", "letters", "pieces of mail"),
    ("holiday photos", "family photos", "photos"),
    ("green peppers", "red peppers", "peppers"),
    ("short candles", "long candles", "candles"),
    ("striped shirts", "plain shirts", "shirts"),
    ("sweet apples", "sour apples", "apples"),
    ("big shells", "small shells", "shells"),
    ("old coins", "new coins", "coins"),
)
ALIVE = (
    ("boys", "girls", "children"),
    ("teachers", "students", "people"),
    ("cats", "dogs", "animals"),
    ("adults", "children", "people"),
    ("cows", "sheep", "animals"),
    ("drummers", "singers", "musicians"),
    ("ducks", "geese", "birds"),
    ("men", "women", "people"),
    ("nurses", "doctors", "people"),
)
PLACES = (
    ("shelf", "shelves"),
    ("tray", "trays"),
    ("crate", "crates"),
    ("cart", "carts"),
    ("table", "tables"),
    ("cupboard", "cupboards"),
    ("tub", "tubs"),
)
SEATS = (
    ("car", "cars"),
    ("boat", "boats"),
    ("tent", "tents"),
    ("bench", "benches"),
    ("cabin", "cabins"),
    ("minibus", "minibuses"),
    ("wagon", "wagons"),
    ("room", "rooms"),
    ("table", "tables"),
)
# Two kinds, both together, and what holds them.
KINDS = tuple(
    (*kinds, *place) for group, places in ((OWNED, PLACES), (ALIVE, SEATS)) for kinds in group for place in places
)
