"""Where things come and go: the words of the stories in which a number of things changes."""

from __future__ import annotations

from dataclasses import dataclass

from word_problems import words


@dataclass(frozen=True)
class Scene:
    """Where things come and go.

    ``starts`` and ``asks`` are sentences, ``gains`` and ``losses`` clauses, with slots who, he, his, other, n, things.
    ``state`` is the subject of a line of work. ``lots``: clauses with slots count, box, n for things that come or go
    in boxes. ``crowd``: the subject is a place.
    """

    things: tuple[str, ...]
    starts: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    asks: tuple[str, ...]
    state: str = "{who} has"
    lots: tuple[str, ...] = ()
    lots_lost: tuple[str, ...] = ()
    crowd: bool = False
    ends: tuple[str, ...] = ("share", "pack", "need", "sell")


GROUPS = ("students", "members", "children", "players", "guests", "visitors", "campers", "workers", "singers")
HAS = (
    "{who} <has|had> {n} {things}.",
    "{who} <starts|started> [the day|the week|out] with {n} {things}.",
    "There <are|were> {n} {things} in {who}'s [room|bag|box|drawer].",
    "{who} <owns|owned> [a total of|] {n} {things}.",
    "{who} [already|] <has|had> {n} {things} [at home|in a box|].",
    "In {his} [bag|collection|desk], {who} <keeps|kept> {n} {things}.",
)
HAS_LEFT = (
    "How many {things} does {who} have [now|left|in the end]?",
    "How many {things} [are left|remain|does {he} have]?",
    "How many {things} [does|will] {who} [now|] have?",
    "What is the number of {things} that {who} has now?",
    "With how many {things} [does|did] {who} end up?",
)
SCENES = [
    Scene(
        tuple(words.COLLECTED),
        HAS,
        (
            "{who} <buys|bought> {n} [more|new|] {things}",
            "{other} <gives|gave> {who} {n} [more|] {things}",
            "{who} <finds|found> {n} [more|old|] {things} [in the attic|under the bed|on the way home|]",
            "{who} <gets|got> {n} [more|] {things} from {his} {kin}",
            "{who} <wins|won> {n} {things} [at a fair|in a game|from {other}]",
            "{who}'s {kin} <brings|brought> {him} {n} {things}",
            "{he} <receives|received> {n} {things} as a [gift|present|prize]",
        ),
        (
            "{who} <gives|gave> {n} [of them|{things}|of the {things}] to {other}",
            "{who} <loses|lost> {n} [of them|{things}|of {his} {things}]",
            "{who} <sells|sold> {n} [of them|{things}] [at a market|to {other}|online|]",
            "{n} of the {things} <break|broke>",
            "{other} <borrows|borrowed> {n} [of them|{things}]",
            "{he} <trades|traded> away {n} [of them|{things}]",
            "{who} <throws|threw> away {n} old {things}",
            "{he} <donates|donated> {n} {things} to a [school|museum|charity]",
        ),
        HAS_LEFT,
        lots=(
            "{who} <buys|bought> {count} {boxes} of {things} with {n} in each",
            "{other} <gives|gave> {who} {count} {boxes} with {n} {things} each",
            "{who} <gets|got> {count} {boxes}, each with {n} {things}",
            "{count} more {boxes} of {n} {things} <arrive|arrived> in the mail",
        ),
        lots_lost=(
            "{who} <gives|gave> {n} {things} to each of {count} [friends|children|cousins]",
            "{who} <sells|sold> {count} {boxes} of {n} {things} each",
            "{count} friends each <take|took> {n} {things}",
            "each of {who}'s {count} friends <receives|received> {n} {things}",
        ),
    ),
    Scene(
        tuple(words.FOOD),
        (
            *HAS[:1],
            "{who} <picks|picked> {n} {things} [in the morning|from the garden|].",
            "There <are|were> {n} {things} in the [kitchen|basket|bowl|fridge].",
            "{who} <makes|made> {n} {things} [for a party|on {day}|].",
            "{who} <buys|bought> {n} {things} at the [market|store].",
            "A basket in {who}'s kitchen <holds|held> {n} {things}.",
        ),
        (
            "{who} <buys|bought> {n} more [{things}|]",
            "{other} <brings|brought> {n} more [{things}|]",
            "{who} <picks|picked> another {n} {things}",
            "{who} <gets|got> {n} {things} from {his} {kin}",
            "{n} more {things} <are|were> delivered",
        ),
        (
            "{who} <eats|ate> {n} [of them|{things}] [for lunch|for breakfast|after dinner|]",
            "{n} of them <are|were> [rotten|spoiled|burnt|bad]",
            "{who} <gives|gave> {n} [{things}|of them] to {his} {kin}",
            "{other} <eats|ate> {n} [{things}|of them]",
            "{who} <uses|used> {n} {things} for a [salad|cake|recipe|soup]",
            "{he} <drops|dropped> {n} {things} on the floor and <has|had> to throw them away",
        ),
        HAS_LEFT,
        lots=(
            "{who} <buys|bought> {count} {boxes} of {things} with {n} in each",
            "{who} <brings|brought> {count} trays of {n} {things}",
            "{other} <brings|brought> {count} {boxes} of {n} {things} each",
            "{count} {boxes} with {n} {things} each <are|were> added",
        ),
        lots_lost=(
            "{who} <gives|gave> {n} {things} to each of {his} {count} [neighbors|friends|cousins]",
            "{count} [children|guests] <eat|ate> {n} {things} each",
            "for {count} days {he} <eats|ate> {n} {things} a day",
            "each of the {count} [guests|visitors] <has|had> {n} {things}",
        ),
    ),
    Scene(
        ("passengers", "people"),
        (
            "A [bus|train|tram] <leaves|left> the [first station|city|depot] with {n} {things} [on board|].",
            "There <are|were> {n} {things} on a [bus|train|ferry|boat].",
            "{n} {things} <are|were> riding on a [bus|train|tram].",
            "A [ferry|bus] <starts|started> its trip with {n} {things}.",
        ),
        (
            "at the [next|following] [stop|station], {n} [more|] {things} <get|got> on",
            "{n} {things} <board|boarded> at the [next|second|last] [stop|station]",
            "{n} more <climb|climbed> on [at the market|at the school|]",
            "another {n} {things} <come|came> aboard",
        ),
        (
            "at the [next|following] [stop|station], {n} {things} <get|got> off",
            "{n} {things} <leave|left> at the [park|museum|library|hospital]",
            "{n} of them <step|stepped> off [at the next stop|]",
            "{n} {things} <exit|exited>",
        ),
        (
            "How many {things} are [now on board|still on board|on it now|on it in the end]?",
            "How many {things} [remain|are left] on it?",
            "How many {things} is it carrying now?",
            "What is the number of {things} on board now?",
        ),
        state="there are",
        crowd=True,
        ends=(),
    ),
    Scene(
        ("cars", "trucks", "bicycles", "motorcycles", "boats"),
        (
            "There <are|were> {n} {things} in a [parking lot|garage|row].",
            "A [dealer|rental company] <has|had> {n} {things}.",
            "{n} {things} <are|were> parked [outside a mall|near the station|by the lake].",
            "In the morning, {n} {things} <stand|stood> in the lot.",
        ),
        (
            "{n} more {things} <arrive|arrived> [in the morning|before noon|at noon|]",
            "another {n} {things} <come|came>",
            "{n} {things} <are|were> brought [in|back]",
            "{n} further {things} <join|joined> them",
        ),
        (
            "{n} {things} <leave|left> [in the afternoon|later|]",
            "{n} of them <are|were> [sold|taken away|rented out]",
            "{n} {things} <go|went> off",
            "{n} of the {things} <disappear|disappeared>",
        ),
        (
            "How many {things} are [there now|there in the end|left]?",
            "How many {things} remain [there|]?",
            "How many {things} does that leave?",
            "What is the number of {things} there now?",
        ),
        state="there are",
        crowd=True,
        lots=(
            "{count} trailers with {n} {things} each <arrive|arrived>",
            "{n} {things} <come|came> on each of {count} [days|trailers]",
            "{count} groups of {n} {things} each <come|came>",
            "then {count} times {n} {things} <turn|turned> up",
        ),
        ends=("need",),
    ),
    Scene(
        ("books", "magazines", "DVDs", "comics", "dictionaries", "novels"),
        (
            "A [library|school|bookstore] <has|had> {n} {things}.",
            "There <are|were> {n} {things} on the [shelves|shelf] of a [library|shop|school].",
            "{who} <looks|looked> after a [shelf|room] with {n} {things}.",
            "The [town library|school library|reading club] <owns|owned> {n} {things}.",
        ),
        (
            "the librarian <buys|bought> {n} new {things}",
            "{n} {things} <are|were> [returned|donated|delivered] [on {day}|]",
            "{other} <brings|brought> back {n} {things}",
            "a donor <hands|handed> over {n} {things}",
        ),
        (
            "{n} {things} <are|were> [borrowed|sold|lent out|taken] [on {day}|]",
            "[visitors|students|readers] <borrow|borrowed> {n} {things}",
            "{n} damaged {things} <are|were> thrown away",
            "{n} {things} <go|went> missing",
        ),
        (
            "How many {things} are there now?",
            "How many {things} [are left|remain] [on the shelves|]?",
            "How many {things} are on the shelves [now|in the end]?",
            "What is the number of {things} on the shelves now?",
        ),
        state="there are",
        crowd=True,
        lots=(
            "{count} boxes with {n} {things} each <are|were> delivered",
            "{count} families <donate|donated> {n} {things} each",
            "on each of {count} days {n} {things} <are|were> brought back",
            "{count} readers <return|returned> {n} {things} each",
        ),
        lots_lost=(
            "{count} students <borrow|borrowed> {n} {things} each",
            "on each of {count} days {n} {things} <are|were> taken out",
            "{count} classes <take|took> {n} {things} each",
            "{n} {things} <leave|left> the shelves on each of {count} days",
        ),
        ends=("pack", "need"),
    ),
    Scene(
        tuple(words.ANIMALS),
        (
            "A farmer <has|had> {n} {things}.",
            "{who} <has|had> {n} {things} on {his} farm.",
            "There <are|were> {n} {things} [on a farm|in a field|in the barn].",
            "On {who}'s farm <live|lived> {n} {things}.",
        ),
        (
            "{n} [more|young|new] {things} <are|were> [born|bought]",
            "the farm <gets|got> {n} more {things}",
            "a neighbor <brings|brought> {n} {things}",
            "{n} {things} <come|came> from the next village",
        ),
        (
            "{n} {things} <are|were> sold [to a neighbor|at the market|]",
            "{n} of the {things} <run|ran> away",
            "{n} {things} <are|were> given to [a cousin|another farm]",
            "{n} of them <escape|escaped> through the fence",
        ),
        (
            "How many {things} are [there now|left|on the farm now]?",
            "How many {things} does the farm have [now|in the end]?",
            "How many {things} [remain|stay]?",
            "What is the number of {things} on the farm now?",
        ),
        state="there are",
        crowd=True,
        lots_lost=(
            "{count} buyers <take|took> {n} {things} each",
            "{n} {things} <are|were> sold to each of {count} neighbors",
            "{count} truckloads of {n} {things} <are|were> driven to the market",
            "each of {count} farms <buys|bought> {n} {things}",
        ),
        ends=("pack", "need"),
    ),
    Scene(
        tuple(words.plural(thing) for thing in words.GOODS),
        (
            "A [shop|store|stall] <has|had> {n} {things} [in stock|].",
            "{who}'s [shop|stall|store] <has|had> {n} {things} [for sale|].",
            "There <are|were> {n} {things} in a [store|warehouse|shop].",
            "In the storeroom of a shop <lie|lay> {n} {things}.",
        ),
        (
            "a delivery of {n} {things} <arrives|arrived>",
            "the [owner|manager] <orders|ordered> {n} more {things}",
            "{n} [more|new] {things} <come|came> in",
            "{n} {things} <are|were> added to the stock",
        ),
        (
            "{n} {things} <are|were> sold [in the morning|on {day}|that week|]",
            "[customers|people] <buy|bought> {n} {things}",
            "{n} {things} <are|were> [damaged|sent back|found broken]",
            "{n} of them <find|found> a buyer",
        ),
        (
            "How many {things} are left?",
            "How many {things} does the [shop|store] have now?",
            "How many {things} remain [in stock|unsold|]?",
            "What is the number of {things} in stock now?",
        ),
        state="there are",
        crowd=True,
        lots=(
            "{count} {boxes} of {n} {things} <arrive|arrived>",
            "{count} deliveries of {n} {things} each <come|came> in",
            "the owner <orders|ordered> {count} {boxes} with {n} {things} each",
            "a truck <brings|brought> {count} {boxes} of {n} {things}",
        ),
        lots_lost=(
            "{n} {things} <are|were> sold on each of {count} days",
            "{count} customers <buy|bought> {n} {things} each",
            "for {count} days the shop <sells|sold> {n} {things} a day",
            "{n} {things} a day <are|were> sold over {count} days",
        ),
        ends=("pack", "sell", "need"),
    ),
    Scene(
        ("dollars",),
        (
            "{who} <has|had> ${n}.",
            "{who} <has|had> {n} dollars in {his} [wallet|piggy bank|bank account].",
            "There <is|was> ${n} in {who}'s [wallet|savings account|purse].",
            "{who} <brings|brought> ${n} to the [market|fair].",
        ),
        (
            "{who} <earns|earned> ${n} [by mowing lawns|by babysitting|by washing cars|at work]",
            "{his} {kin} <gives|gave> {him} ${n}",
            "{who} <gets|got> ${n} [for {his} birthday|as an allowance|from {other}]",
            "{he} <finds|found> ${n} in an old coat",
        ),
        (
            "{who} <spends|spent> ${n} on [a {good}|lunch|food|clothes]",
            "{he} <pays|paid> ${n} for [a {good}|a ticket|a snack]",
            "{who} <gives|gave> ${n} to {other}",
            "{who} <lends|lent> {his} {kin} ${n}",
            "${n} <goes|went> for a haircut",
        ),
        (
            "How much money does {who} have [now|left|in the end]?",
            "How many dollars does {he} have [left|now]?",
            "How much [is left|money is left|does {he} have left]?",
            "What amount of money does {who} end up with?",
        ),
        lots=(
            "{who} <earns|earned> ${n} a day for {count} days",
            "{who} <sells|sold> {count} {goods} for ${n} each",
            "{count} neighbors <pay|paid> {him} ${n} each",
            "each of {count} weeks <brings|brought> {him} ${n}",
        ),
        lots_lost=(
            "{who} <buys|bought> {count} {goods} for ${n} each",
            "{who} <buys|bought> {count} {goods} that <cost|cost> ${n} each",
            "for {count} days {he} <spends|spent> ${n} a day on lunch",
            "{count} {goods} at ${n} each <are|were> paid from it",
        ),
        ends=("need", "share"),
    ),
    Scene(
        ("liters of water", "gallons of water", "liters of oil", "gallons of fuel"),
        (
            "A tank <holds|held> {n} {things}.",
            "There <are|were> {n} {things} in a [tank|barrel].",
            "A farmer's [tank|barrel] <contains|contained> {n} {things}.",
            "In the morning, {n} {things} <are|were> in the tank.",
        ),
        (
            "{n} {things} <are|were> [added|poured in]",
            "another {n} {unit} <flow|flowed> in",
            "{who} <pours|poured> in {n} more {unit}",
            "{n} {unit} <are|were> pumped into it",
        ),
        (
            "{n} {unit} <are|were> [used|taken out|drained]",
            "{n} {unit} <leak|leaked> out",
            "{who} <takes|took> out {n} {unit}",
            "{n} {unit} <run|ran> off",
        ),
        (
            "How many {unit} are [left|in it now|there now]?",
            "How many {things} remain?",
            "How much does it hold now, in {unit}?",
            "What is the amount in it now, in {unit}?",
        ),
        state="it holds",
        crowd=True,
        lots=(
            "{count} buckets of {n} {unit} each <are|were> poured in",
            "for {count} minutes {n} {unit} a minute <flow|flowed> in",
            "{who} <adds|added> {count} cans of {n} {unit} each",
            "{count} cans with {n} {unit} each <are|were> emptied into it",
        ),
        lots_lost=(
            "for {count} hours it <loses|lost> {n} {unit} an hour",
            "{count} buckets of {n} {unit} <are|were> taken out",
            "{n} {unit} a day <are|were> used for {count} days",
            "{count} cans of {n} {unit} each <are|were> filled from it",
        ),
        ends=("need",),
    ),
    Scene(
        tuple(words.PLANTS),
        (
            "There <are|were> {n} {things} in {who}'s garden.",
            "A [park|garden|nursery] <has|had> {n} {things}.",
            "{who} <planted|had planted> {n} {things} [in spring|last year|].",
            "{n} {things} <grow|grew> along a path.",
        ),
        (
            "{who} <plants|planted> {n} more [{things}|]",
            "[workers|volunteers] <plant|planted> another {n}",
            "{n} {things} <are|were> added",
            "{other} <puts|put> in {n} new {things}",
        ),
        (
            "{n} of them <die|died> [in the winter|in the heat|]",
            "{who} <gives|gave> away {n} [{things}|of them]",
            "{n} {things} <are|were> [cut down|removed|dug out|eaten by deer]",
            "a storm <destroys|destroyed> {n} of them",
        ),
        (
            "How many {things} are [there now|left|in the garden now]?",
            "How many {things} remain?",
            "How many {things} are growing there now?",
            "What is the number of {things} there now?",
        ),
        state="there are",
        crowd=True,
        lots=(
            "{who} <plants|planted> {count} [more|new] rows of {n} {things} [each|]",
            "{count} rows with {n} {things} each <are|were> added",
            "{count} volunteers <plant|planted> {n} {things} each",
            "each of {count} visitors <puts|put> in {n} {things}",
        ),
        ends=("need",),
    ),
    Scene(
        ("points",),
        (
            "{who} <has|had> {n} points in a [game|quiz|contest].",
            "After the first round of a game, {who} <has|had> {n} points.",
            "{who} <scores|scored> {n} points in the first [half|level|round] of a game.",
            "In a quiz, {who} <begins|began> with {n} points.",
        ),
        (
            "{he} <scores|scored> {n} [more|] points [in the next round|]",
            "{who} <gets|got> {n} points for [a correct answer|a bonus|finding a treasure]",
            "{he} <earns|earned> {n} more",
            "a lucky card <gives|gave> {him} {n} points",
        ),
        (
            "{he} <loses|lost> {n} points [for a mistake|in the next round|]",
            "a wrong answer <costs|cost> {him} {n} points",
            "a penalty <takes|took> away {n} points",
            "{he} <trades|traded> {n} points for a hint",
        ),
        (
            "How many points does {who} have [now|in the end]?",
            "What is {who}'s score [now|in the end]?",
            "How many points [did|does] {he} end with?",
            "With what score does {who} finish?",
        ),
        lots=(
            "{he} <answers|answered> {count} questions correctly for {n} points each",
            "{he} <finds|found> {count} treasures worth {n} points each",
            "{he} <scores|scored> {n} points in each of the next {count} rounds",
            "{count} bonus cards of {n} points each <come|came> {his} way",
        ),
        lots_lost=(
            "{he} <makes|made> {count} mistakes that <cost|cost> {n} points each",
            "{he} <buys|bought> {count} hints for {n} points each",
            "{count} wrong answers <cost|cost> {him} {n} points each",
            "{n} points each <are|were> taken off for {count} fouls",
        ),
        ends=("need",),
    ),
    Scene(
        GROUPS,
        (
            "A [club|school|team|camp] <has|had> {n} {things}.",
            "There <are|were> {n} {things} [in a hall|at a party|at a camp|in a club].",
            "{n} {things} <sign|signed> up for a [trip|course|show].",
            "On {day}, {n} {things} <are|were> there.",
        ),
        (
            "{n} [more|new|] {things} <join|joined> [them|]",
            "another {n} {things} <arrive|arrived> [later|after lunch|]",
            "{n} {things} <come|came> in",
            "{n} more <show|showed> up",
        ),
        (
            "{n} {things} <leave|left> [early|later|at noon|]",
            "{n} of them <go|went> home",
            "{n} {things} <quit|quit>",
            "{n} {things} <are|were> [sick|absent|picked up]",
        ),
        (
            "How many {things} are [there now|left|still there]?",
            "How many {things} [remain|stay]?",
            "How many {things} are there in the end?",
            "What is the number of {things} there now?",
        ),
        state="there are",
        crowd=True,
        lots=(
            "{count} groups of {n} {things} each <arrive|arrived>",
            "{count} [buses|vans] with {n} {things} each <arrive|arrived>",
            "{count} teams of {n} {things} each <join|joined>",
            "{n} {things} <come|came> with each of {count} buses",
        ),
        ends=("pack", "need"),
    ),
    Scene(
        ("photos", "songs", "messages", "games", "contacts", "recordings", "drawings", "apps"),
        (
            "{who} <has|had> {n} {things} on {his} [phone|computer|tablet].",
            "There <are|were> {n} {things} on {who}'s [phone|tablet|computer].",
            "{who}'s [phone|laptop] <holds|held> {n} {things}.",
            "{n} {things} <are|were> stored on {who}'s tablet.",
        ),
        (
            "{he} <adds|added> {n} [more|new] {things}",
            "{other} <sends|sent> {him} {n} {things}",
            "{who} <gets|got> {n} more",
            "{n} {things} <come|came> in on {day}",
        ),
        (
            "{he} <deletes|deleted> {n} [of them|{things}]",
            "{who} <removes|removed> {n} {things}",
            "{n} of them <are|were> [moved to another device|erased by mistake]",
            "{n} {things} <get|got> lost",
        ),
        (
            "How many {things} [are left|does {who} have now]?",
            "How many {things} are on it now?",
            "How many {things} does {he} have [left|now]?",
            "What is the number of {things} on it now?",
        ),
        lots=(
            "{he} <adds|added> {n} {things} a day for {count} days",
            "{count} friends <send|sent> {him} {n} {things} each",
            "on each of {count} days {he} <saves|saved> {n} {things}",
            "{n} {things} <come|came> from each of {count} friends",
        ),
        ends=("need",),
    ),
]
