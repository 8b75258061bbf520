"""A job file, and what can be wrong with it."""

JOB = """\
[structure]
file = "cu.xyz"

[potential]
name = "sevennet:7net-0"

[dynamics]
timestep_fs = 2
seed = 7

[velocities]
temperature_K = 0

[[stages]]
name = "heat"
steps = 100
thermostat = "langevin"
temperature_K = { start = 0, end = 300.5 }
friction_per_ps = 5

[[stages]]
steps = 1_000
thermostat = "nose-hoover-chain"
temperature_K = 300
damping_fs = 200

[[trajectories]]
file = "md.h5"
every_steps = 10
fields = ["velocities"]
"""

KELVIN = "expected a number >= 0 (the unit is K)"
KELVIN_OR_RAMP = f"{KELVIN} or a ramp such as {{ start = 100, end = 300 }}"
ABOVE_ZERO = KELVIN_OR_RAMP.replace(">= 0", "> 0")
FEMTOSECONDS = "expected a number > 0 and <= 20 (the unit is fs)"
LENGTH = "'steps': expected a whole number >= 0, the length of the stage"
REPEAT = "expected three whole numbers >= 1, as in [2, 2, 1]"
SEED = "expected a whole number >= 0 and < 2**64, the seed of all random numbers"
AXES = "'cut_axes': expected at least one axis and none twice"
SUFFIXES = ".traj, .xyz, .extxyz, .h5, .h5md"
FAMILIES = "['lennard-jones', 'mace', 'sevennet', 'two-hop']"
THERMOSTATS = "['none', 'langevin', 'velocity-rescaling', 'nose-hoover-chain']"
WALL = "expected HH:MM:SS or D-HH:MM:SS, such as '23:50:00' or '2-12:00:00'"

# What is replaced in the job above, by what, and what is said of it.
WRONG = [
    # A misspelt key is not called missing as well.
    (
        "temperature_K = 300\n",
        "temprature_K = 300\n",
        "24: [[stages]] 2: unknown key 'temprature_K' (did you mean 'temperature_K'?)",
    ),
    ("seed", "Seeed", "9: [dynamics]: unknown key 'Seeed' (did you mean 'seed'?)"),
    (
        "seed = 7",
        "seed = 7\nfriction_per_ps = 1",
        "10: [dynamics]: unknown key 'friction_per_ps' (it belongs to [[stages]])",
    ),
    (
        "[potential]",
        "timestep_fs = 1\n[potential]",
        "4: [structure]: unknown key 'timestep_fs' (it belongs to [dynamics])",
    ),
    (
        "[potential]",
        "zzz = 1\n[potential]",
        "4: [structure]: unknown key 'zzz'; known are ['file', 'format', 'index', 'repeat']",
    ),
    (
        "end = 300.5",
        "edn = 3",
        "18: [[stages]] 1: unknown key 'temperature_K.edn' (did you mean 'end'?)",
    ),
    (
        "[structure]",
        '[structure]\n"a b".c = 1',
        "2: [structure]: unknown key 'a b'; known are ['file', 'format', 'index', 'repeat']",
    ),
    # Tables.
    (
        "[[trajectories]]",
        "[trajectory]",
        "27: unknown table [trajectory] (did you mean 'trajectories'?)",
    ),
    (
        "[structure]",
        "steps = 3\n[structure]",
        "1: key 'steps' stands before any table; it belongs to [[stages]]",
    ),
    (
        "[structure]",
        "stage = 3\n[structure]",
        "1: unknown key 'stage' before any table (did you mean 'stages'?)",
    ),
    ("[structure]", "xx = 3\n[structure]", "1: unknown key 'xx' before any table"),
    (
        "[velocities]\n",
        "[thermo.log]\n",
        "11: unknown table [thermo]; known are ['structure', 'potential', 'dynamics', "
        "'velocities', 'output', 'checkpoint', 'limits', 'stages', 'trajectories']",
    ),
    (
        "[[trajectories]]",
        "[trajectories]",
        "27: [trajectories]: expected an array of tables, each under [[trajectories]], found a "
        "table",
    ),
    (
        "[velocities]\ntemperature_K = 0",
        "[limits]\n[[velocities]]",
        "12: [velocities]: expected a table, found an array of 1",
    ),
    ("[structure]", "checkpoint = 10\n[structure]", "1: [checkpoint]: expected a table, found 10"),
    (
        "[dynamics]\ntimestep_fs = 2\nseed = 7",
        "",
        "the table [dynamics] is missing: expected one with timestep_fs",
    ),
    (
        '[potential]\nname = "sevennet:7net-0"',
        "",
        "the table [potential] is missing: expected one with name",
    ),
    # Types: a text is no number, true is no number, a number with a point is no whole number.
    (
        "timestep_fs = 2",
        'timestep_fs = "2"',
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found '2' (a text)",
    ),
    (
        "timestep_fs = 2",
        "timestep_fs = true",
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found true (a boolean)",
    ),
    (
        "timestep_fs = 2",
        "timestep_fs = nan",
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found nan",
    ),
    ("timestep_fs = 2\n", "", "7: [dynamics]: 'timestep_fs' is missing: " + FEMTOSECONDS),
    ("seed = 7", "seed = 7.0", f"9: [dynamics]: 'seed': {SEED}, found 7.0"),
    ("seed = 7", "seed = false", f"9: [dynamics]: 'seed': {SEED}, found false (a boolean)"),
    ("steps = 100", 'steps = "ten"', f"16: [[stages]] 1: {LENGTH}, found 'ten' (a text)"),
    ("steps = 100", "steps = 100.0", f"16: [[stages]] 1: {LENGTH}, found 100.0"),
    ("steps = 1_000\n", "", f"21: [[stages]] 2: 'steps' is missing: {LENGTH[9:]}"),
    (
        "K = 300\n",
        'K = "300"\n',
        f"24: [[stages]] 2: 'temperature_K': {ABOVE_ZERO}, found '300' (a text)",
    ),
    (
        "K = 300\n",
        "K = [300]\n",
        f"24: [[stages]] 2: 'temperature_K': {ABOVE_ZERO}, found an array of 1",
    ),
    (
        "end = 300.5",
        "end = '3'",
        "18: [[stages]] 1: 'temperature_K.end': expected a number, the target where the stage "
        "ends, found '3' (a text)",
    ),
    (
        ", end = 300.5",
        "",
        "18: [[stages]] 1: 'temperature_K.end' is missing: expected a number, the target where "
        "the stage ends",
    ),
    (
        '"cu.xyz"',
        "3",
        "2: [structure]: 'file': expected the name of a file that ASE can read, found 3",
    ),
    (
        '"cu.xyz"',
        "1979-05-27",
        "2: [structure]: 'file': expected the name of a file that ASE can read, found 1979-05-27 "
        "(a date or time)",
    ),
    (
        '"cu.xyz"',
        '""',
        "2: [structure]: 'file': expected the name of a file that ASE can read, found '' (a text)",
    ),
    (
        '["velocities"]',
        "[\n'velocities',\n3]",
        "32: [[trajectories]] 1: 'fields', entry 2: expected an array of texts, such as "
        "['velocities', 'forces'], found 3",
    ),
    (
        '["velocities"]',
        "'velocities'",
        "30: [[trajectories]] 1: 'fields': expected an array of texts, such as ['velocities', "
        "'forces'], found 'velocities' (a text)",
    ),
    (
        "K = 0",
        "K = 0\nreplace = 1",
        "13: [velocities]: 'replace': expected true or false: draw also where there are some, "
        "found 1",
    ),
    # Ranges; the unit is in the message.
    (
        "timestep_fs = 2",
        "timestep_fs = 0",
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found 0",
    ),
    (
        "timestep_fs = 2",
        "timestep_fs = -1",
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found -1",
    ),
    (
        "timestep_fs = 2",
        "timestep_fs = 20.5",
        f"8: [dynamics]: 'timestep_fs': {FEMTOSECONDS}, found 20.5",
    ),
    ("seed = 7", "seed = -1", f"9: [dynamics]: 'seed': {SEED}, found -1"),
    ("seed = 7", f"seed = {2**64}", f"9: [dynamics]: 'seed': {SEED}, found {2**64}"),
    (
        "seed = 7",
        "skin_A = -0.1\nseed = 7",
        "9: [dynamics]: 'skin_A': expected a number >= 0 and <= 10 (the unit is Å), found -0.1",
    ),
    (
        "seed = 7",
        "cut_axes = [0, 3]\nseed = 7",
        "9: [dynamics]: 'cut_axes', entry 2: expected an array of axes of the cell that may be "
        "cut, such as [0, 1, 2], found 3",
    ),
    ("seed = 7", "cut_axes = []\nseed = 7", f"9: [dynamics]: {AXES}, found []"),
    ("seed = 7", "cut_axes = [1, 1]\nseed = 7", f"9: [dynamics]: {AXES}, found [1, 1]"),
    (
        "seed = 7",
        "device = 'gpu'\nseed = 7",
        "9: [dynamics]: 'device': expected 'cpu', 'cuda' or 'cuda:0', found 'gpu' (did you mean "
        "'cpu'?)",
    ),
    ("K = 0", "K = -1", f"12: [velocities]: 'temperature_K': {KELVIN}, found -1"),
    ("K = 0", "K = inf", f"12: [velocities]: 'temperature_K': {KELVIN}, found inf"),
    ("steps = 100", "steps = -5", f"16: [[stages]] 1: {LENGTH}, found -5"),
    ("K = 300\n", "K = -300\n", f"24: [[stages]] 2: 'temperature_K': {ABOVE_ZERO}, found -300"),
    (
        "start = 0",
        "start = -1",
        "18: [[stages]] 1: 'temperature_K': expected a start and an end >= 0 (the unit is K), "
        "found -1 and 300.5",
    ),
    (
        "K = 300\n",
        "K = 0\n",
        "24: [[stages]] 2: 'temperature_K': a Nosé-Hoover chain needs a temperature > 0 (the "
        "unit is K): the masses of its links are in proportion to it",
    ),
    (
        "K = 300\n",
        "K = { start = 300, end = 0 }\n",
        "24: [[stages]] 2: 'temperature_K': a Nosé-Hoover chain needs a temperature > 0 (the "
        "unit is K): the masses of its links are in proportion to it",
    ),
    (
        "friction_per_ps = 5",
        "friction_per_ps = -5",
        "19: [[stages]] 1: 'friction_per_ps': expected a number >= 0 (the unit is 1/ps), found -5",
    ),
    (
        "damping_fs = 200",
        "damping_fs = 0",
        "25: [[stages]] 2: 'damping_fs': expected a number > 0 (the unit is fs), found 0",
    ),
    (
        "damping_fs = 200",
        "damping_fs = 200\nchain_length = 0",
        "26: [[stages]] 2: 'chain_length': expected a whole number >= 1, found 0",
    ),
    (
        '"cu.xyz"',
        '"cu.xyz"\nrepeat = [1, 2, 0]',
        f"3: [structure]: 'repeat', entry 3: {REPEAT}, found 0",
    ),
    (
        '"cu.xyz"',
        '"cu.xyz"\nrepeat = [1, 2]',
        f"3: [structure]: 'repeat': {REPEAT}, found an array of 2",
    ),
    ('"cu.xyz"', '"cu.xyz"\nrepeat = 2', f"3: [structure]: 'repeat': {REPEAT}, found 2"),
    (
        '"cu.xyz"',
        '"cu.xyz"\nformat = "extxzy"',
        "3: [structure]: 'format': ASE has no format 'extxzy' (did you mean 'extxyz'?)",
    ),
    (
        "every_steps = 10",
        "every_steps = 0",
        "29: [[trajectories]] 1: 'every_steps': expected a whole number >= 1, found 0",
    ),
    (
        "every_steps = 10\n",
        "",
        "27: [[trajectories]] 1: 'every_steps' is missing: expected a whole number >= 1",
    ),
    (
        "[velocities]",
        "[output]\nlog_every_steps = 0\n[velocities]",
        "12: [output]: 'log_every_steps': expected a whole number >= 1, found 0",
    ),
    (
        "[velocities]",
        "[checkpoint]\nkeep = 1\n[velocities]",
        "12: [checkpoint]: 'keep': expected a whole number >= 2, so that one is left when the "
        "newest is damaged, found 1",
    ),
    (
        "[velocities]",
        "[limits]\nwall_time = '30'\n[velocities]",
        f"12: [limits]: 'wall_time': {WALL}, found '30'",
    ),
    (
        "[velocities]",
        "[limits]\nwall_time = '00:00:00'\n[velocities]",
        f"12: [limits]: 'wall_time': {WALL}, found '00:00:00'",
    ),
    (
        "[velocities]",
        "[limits]\nwall_time = '1:60:00'\n[velocities]",
        f"12: [limits]: 'wall_time': {WALL}, found '1:60:00'",
    ),
    (
        "[velocities]",
        "[limits]\nwall_time = 23:50:00\n[velocities]",
        "12: [limits]: 'wall_time': expected a text such as '23:50:00' or '2-12:00:00', found "
        "23:50:00 (a date or time)",
    ),
    (
        "[velocities]",
        "[limits]\nmax_move_A = 0\n[velocities]",
        "12: [limits]: 'max_move_A': expected a number > 0 (the unit is Å per step), or 'none', "
        "found 0",
    ),
    (
        "[velocities]",
        "[limits]\nmax_drift_eV_per_atom = 'non'\n[velocities]",
        "12: [limits]: 'max_drift_eV_per_atom': expected a number > 0 (the unit is eV per atom), "
        "or 'none', found 'non' (a text) (did you mean 'none'?)",
    ),
    # Thermostats.
    (
        '"langevin"',
        '"lagnevin"',
        f"17: [[stages]] 1: 'thermostat': expected one of {THERMOSTATS}, found 'lagnevin' (a "
        "text) (did you mean 'langevin'?)",
    ),
    (
        '"langevin"',
        "300",
        f"17: [[stages]] 1: 'thermostat': expected one of {THERMOSTATS}, found 300",
    ),
    (
        "friction_per_ps = 5",
        "friction_per_ps = 5\ndamping_fs = 1",
        "20: [[stages]] 1: 'damping_fs' is no parameter of thermostat 'langevin'; it belongs to "
        "'velocity-rescaling' or 'nose-hoover-chain'",
    ),
    (
        "[[trajectories]]",
        "[[stages]]\nsteps = 1\ntemperature_K = 1\n[[trajectories]]",
        "29: [[stages]] 3: 'temperature_K' is no parameter of thermostat 'none'; it belongs to "
        "'langevin' or 'velocity-rescaling' or 'nose-hoover-chain'",
    ),
    (
        "damping_fs = 200\n",
        "",
        "21: [[stages]] 2: 'damping_fs' is missing: expected a number > 0 (the unit is fs)",
    ),
    # Potentials.
    (
        '"sevennet:7net-0"',
        '"sevenet:7net-0"',
        f"5: [potential]: 'name': expected one of {FAMILIES}, as in 'sevennet:7net-0' or "
        "'two-hop', found 'sevenet:7net-0' (did you mean 'sevennet'?)",
    ),
    (
        '"sevennet:7net-0"',
        '"sevennet"',
        "5: [potential]: 'name': expected a model, as in 'sevennet:7net-0', found 'sevennet'",
    ),
    (
        '"sevennet:7net-0"',
        '"two-hop:x"',
        "5: [potential]: 'name': expected 'two-hop', which has no models to choose from, found "
        "'two-hop:x'",
    ),
    (
        '"sevennet:7net-0"',
        "7",
        "5: [potential]: 'name': expected a text such as 'sevennet:7net-0', found 7",
    ),
    (
        'name = "sevennet:7net-0"\n',
        "",
        "4: [potential]: 'name' is missing: expected a text such as 'sevennet:7net-0'",
    ),
    (
        '7net-0"',
        '7net-0"\nmodl = "PBE"',
        "6: [potential]: unknown key 'modl' (did you mean 'modal'?)",
    ),
    ('7net-0"', '7net-0"\nmodal = 3', "6: [potential]: 'modal': expected a text, found 3"),
    (
        '7net-0"',
        '7net-0"\ndtype = "float46"',
        "6: [potential]: 'dtype': expected 'float32' or 'float64', found 'float46' (a text) (did "
        "you mean 'float64'?)",
    ),
    (
        '"sevennet:7net-0"',
        '"two-hop"\nelements = ["Cu"]',
        "6: [potential]: 'elements', entry 1: expected an array, each entry a whole number, "
        "found 'Cu' (a text)",
    ),
    (
        '"sevennet:7net-0"',
        '"two-hop"\nrc = -1',
        "4: [potential]: rc must be a length > 0 Å, got -1.0",
    ),
    (
        '"sevennet:7net-0"',
        '"lennard-jones"\nsigma = {Cu = "2"}',
        "6: [potential]: 'sigma': expected a number or a table with a number for each key, found "
        "a table",
    ),
    (
        '"sevennet:7net-0"',
        '"mace:x.model"\ndevice = "cpu"',
        "6: [potential]: unknown key 'device' (it belongs to [dynamics])",
    ),
    # What only fits together badly.
    (
        "seed = 7\n",
        "",
        "7: [dynamics]: 'seed' is missing: expected a whole number such as seed = 1, because "
        "velocities are drawn or a thermostat is random; another seed is another trajectory",
    ),
    (
        "steps = 1_000",
        "steps = 1_000\nname = 'heat'",
        "23: [[stages]] 2: 'name': expected another than [[stages]] 1 has, found 'heat'",
    ),
    (
        "[[trajectories]]",
        "[[trajectories]]\nfile = 'md.h5'\nevery_steps = 1\n[[trajectories]]",
        "31: [[trajectories]] 2: 'file': expected another than [[trajectories]] 1 has, found "
        "'md.h5'",
    ),
    # Trajectories.
    (
        '"md.h5"',
        '"a/md.h5"',
        "28: [[trajectories]] 1: 'file': expected a file name without a folder (it stands in "
        "that of [output]), found 'a/md.h5'",
    ),
    (
        '"md.h5"',
        '"md.xzy"',
        f"28: [[trajectories]] 1: 'file': expected a file name that ends in one of {SUFFIXES}, "
        "found 'md.xzy' (did you mean '.xyz'?)",
    ),
    (
        '["velocities"]',
        '["forces", "forces"]',
        "30: [[trajectories]] 1: 'fields': expected no field twice, found ['forces', 'forces']",
    ),
    (
        '["velocities"]',
        '["positions"]',
        "30: [[trajectories]] 1: 'fields': leave out 'positions', which every frame has",
    ),
    (
        '["velocities"]',
        '[]\nprecision = "double"',
        "31: [[trajectories]] 1: 'precision': expected 'float32' or 'float64', found 'double' (a "
        "text)",
    ),
    (
        '["velocities"]',
        '["momenta"]',
        "27: [[trajectories]] 1: md.h5: H5MD has no momenta; use velocities",
    ),
    # Files.
    (
        '"cu.xyz"',
        '"cuu.xyz"',
        "2: [structure]: 'file': there is no file FOLDER/cuu.xyz (did you mean 'cu.xyz'?)",
    ),
    ('"cu.xyz"', '"no/cu.xyz"', "2: [structure]: 'file': there is no file FOLDER/no/cu.xyz"),
    (
        "sevennet:7net-0",
        "mace:cu.xy",
        "5: [potential]: 'name': there is no file FOLDER/cu.xy (did you mean 'cu.xyz'?)",
    ),
    ("sevennet:7net-0", "sevennet:a.pth", "5: [potential]: 'name': there is no file FOLDER/a.pth"),
]
