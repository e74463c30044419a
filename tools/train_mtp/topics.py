"""What the training prompts are about, and the held-out prompts that a head is judged on: no topic is in both."""

from __future__ import annotations

_TOPICS = """
photosynthesis; black holes; the water cycle; plate tectonics; earthquakes; glaciers; coral reefs; rainforests; deserts; the ozone layer;
climate change; the greenhouse effect; solar energy; wind turbines; nuclear power; batteries; electric cars; hydrogen fuel; recycling;
composting; beekeeping; butterflies; migratory birds; penguins; elephants; wolves; whales; octopuses; sharks; frogs; snakes; spiders;
ants; honey; mushrooms; oak trees; cactus plants; roses; house plants; vegetable gardens; growing tomatoes; soil; irrigation; crop
rotation; dairy farming; sheep; horses; cats; puppies; goldfish; parrots; adopting a pet; veterinary care; dinosaurs; fossils; evolution;
DNA; genetics; cells; bacteria; viruses; vaccines; antibiotics; the immune system; the human heart; the brain; memory; sleep; dreams;
stress; anxiety; meditation; yoga; running; swimming; cycling; hiking; rock climbing; weight lifting; stretching; back pain; headaches;
allergies; diabetes; blood pressure; healthy eating; vitamins; protein; sugar; vegetarian food; breakfast ideas; packed lunches; soup;
bread baking; pizza; pasta; rice dishes; curry; tacos; sushi; salads; pancakes; chocolate cake; cookies; ice cream; coffee; tea; wine;
cheese; olive oil; spices; kitchen knives; cooking for children; meal planning; grocery shopping; saving money; budgets; credit cards;
mortgages; taxes; inflation; interest rates; the stock market; index funds; cryptocurrency; insurance; retirement; starting a business;
marketing; sales calls; customer service; job interviews; resumes; cover letters; salary negotiation; remote work; office meetings;
leadership; teamwork; time management; procrastination; goal setting; habits; note taking; studying for exams; learning a language; public
speaking; essay writing; reading; poetry; novels; Shakespeare; Greek myths; fairy tales; science fiction; detective stories; comic books;
film making; photography; painting; sculpture; architecture; bridges; skyscrapers; castles; cathedrals; the pyramids; ancient Rome;
ancient Greece; the Vikings; the Silk Road; the Renaissance; the French Revolution; the Industrial Revolution; the First World War; the
Second World War; the Cold War; the moon landing; the space station; Mars; Jupiter; comets; telescopes; satellites; rockets; gravity;
relativity; quantum physics; atoms; the periodic table; chemical reactions; acids; magnets; electricity; light; sound; heat; friction;
simple machines; steam engines; airplanes; helicopters; submarines; trains; bicycles; traffic; city planning; public transport; road
safety; maps; compasses; navigation; sailing; fishing; camping; the Alps; the Amazon river; the Sahara; the Pacific Ocean; Antarctica;
Iceland; Japan; India; Brazil; Canada; Mexico; Egypt; Kenya; France; Italy; Spain; Germany; China; Australia; New York; London; Paris;
Tokyo; travel planning; airports; hotels; packing a suitcase; museums; festivals; weddings; birthdays; Christmas; New Year; holidays with
family; gift ideas; friendship; neighbors; parenting; babies; toddlers; teenagers; grandparents; schools; teachers; homework;
universities; libraries; mathematics; fractions; algebra; geometry; probability; statistics; calculus; prime numbers; logic; puzzles;
chess; card games; board games; video games; football; basketball; tennis; baseball; golf; the Olympics; music theory; guitar; piano;
violin; drums; singing; jazz; opera; hip hop; dance; theatre; fashion; shoes; sewing; knitting; woodworking; pottery; home repair;
plumbing; painting a room; interior design; furniture; cleaning; laundry; moving house; renting a flat; computers; keyboards; operating
systems; Linux; databases; SQL; spreadsheets; programming; Python; JavaScript; web design; APIs; testing software; debugging; version
control; algorithms; sorting; recursion; data structures; encryption; passwords; computer security; privacy; email; social media; mobile
phones; search engines; artificial intelligence; machine learning; neural networks; chatbots; robots; drones; self-driving cars; virtual
reality; 3D printing; the internet; Wi-Fi; cloud computing; democracy; elections; constitutions; human rights; the United Nations; law
courts; contracts; police work; firefighters; nurses; doctors; dentists; engineers; pilots; farmers; journalists; newspapers; radio;
television; advertising; charity; volunteering; poverty; hunger; clean water; education for all; gender equality; immigration; languages
of the world; translation; idioms; grammar; spelling; the alphabet; handwriting; calendars; clocks; time zones; seasons; weather
forecasts; thunderstorms; hurricanes; snow; rainbows; volcanoes; tides; rivers; lakes; caves; mountains; islands; gold; diamonds; iron and
steel; glass; paper; plastic; cotton; leather; rubber; oil; natural gas; coal; philosophy; ethics; happiness; courage; honesty; justice;
religion; Buddhism; Stoicism; psychology; motivation; creativity; humor; magic tricks; ghosts; pirates; knights; dragons; wizards; aliens;
time travel; superheroes; detectives; spies; treasure hunts; lost cities; shipwrecks; lighthouses; trains at night; old houses; a talking
dog
"""
TOPICS = tuple(" ".join(topic.split()) for topic in _TOPICS.split(";"))

HELD_OUT_CHAT = (
    "How do microscope lenses differ from ordinary lenses?",
    "Explain why pickled cabbage keeps so long.",
    "Give me five tips for assembling a jigsaw faster.",
    "Write a short story about a clockmaker who repairs a broken carousel.",
    "What are the main causes of tooth decay?",
    "Write a Python function that converts Roman numerals to integers.",
    "Summarize the life cycle of a salmon.",
    "What is the difference between a cooper and a blacksmith?",
    "List the steps to change a flat tire.",
    "Write an email to my landlord about a broken elevator.",
    "Who invented the telegraph and why did it matter?",
    "Translate to French: The ferry leaves the harbor at noon.",
    "Make a JSON object that describes an umbrella with color, size and price.",
    "What should I consider before buying a hearing aid?",
    "Explain supply chains to a ten year old.",
    "Write a haiku about an abandoned quarry.",
    "Compare bamboo and granite as building materials.",
    "How does a vending machine recognize coins?",
    "Give three arguments for and against school uniforms.",
    "What is the capital of Mongolia and what is it known for?",
)
HELD_OUT_PLAIN = (
    "The history of the umbrella begins in",
    "Hummingbirds are among the smallest",
    "def roman_to_int(s):\n    values = {",
    "Once upon a time a basket weaver lived near",
    "The three most common kinds of knots are",
    "In 1815 the eruption of Tambora",
    "To sharpen a chisel, start with",
    "Dear Mr. Abernathy,\n\nThank you for your application",
    "The function of the pancreas is",
    "# Installing a printer\n\n1. Unpack",
    "The scarecrow stood in the field and",
    "An ombudsman is a person who",
    "class Thermostat:\n    def __init__(self,",
    "Lacquer is a hard finish that",
    "Question: What is the boiling point of mercury?\nAnswer:",
    "The parade started late because",
    "Accordion players often",
    "Meeting minutes, 4 March\n\nPresent:",
    "Salt mines were once",
    "SELECT name, salary FROM staff WHERE",
)
