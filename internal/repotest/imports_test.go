package repotest

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "fleetd/"

// rule is what one package, with the packages below it, may import.
type rule struct {
	pkg string
	// may are the packages of this module that it may import directly; packages below pkg are not restricted.
	may []string
	// never are import paths it may reach neither directly nor through others, with everything below them.
	never []string
	why   string
}

// importRules cover every package that is part of the product. The core owns the interfaces; adapters use it
// and do not know each other.
var importRules = []rule{
	{pkg: "internal/jsonspan", why: "it reads JSON text and does not interpret it; every wire package builds on it"},
	{pkg: "internal/hello", may: []string{"internal/jsonspan"}, why: "the handshake documents are pure wire formats, which any side must be able to use"},
	{pkg: "internal/envelope", may: []string{"internal/jsonspan"}, why: "the outer message and its frames are pure wire formats, which any side must be able to use"},
	{pkg: "internal/mcpclient", may: []string{"internal/jsonspan"}, why: "it speaks MCP to one peer over a function and has no device, session or socket"},
	{pkg: "internal/clock", may: []string{"internal/timescale"}, why: "every package may ask it for the time, as package time"},
	{pkg: "internal/timescale", why: "it scales intervals and depends on nothing that has them"},
	{pkg: "internal/durable", why: "it writes files, whatever is in them"},
	{pkg: "internal/credential", why: "tokens are minted and verified from bytes; who owns them is decided elsewhere"},
	{pkg: "internal/egress", why: "it judges addresses, whoever connects"},
	{pkg: "internal/cleantext", why: "it cleans text, whoever shows it"},
	{pkg: "internal/timespan", why: "it reads durations, whatever they are for"},
	{pkg: "internal/selector", may: []string{"internal/timespan"}, why: "one grammar selects devices everywhere, so it depends on nothing that has them"},
	{pkg: "internal/access", may: []string{"internal/jsonspan", "internal/selector"}, why: "who may do what is decided from its arguments; every way in must be able to ask it"},
	{pkg: "internal/audit", may: []string{"internal/api", "internal/counters", "internal/jsonspan"}, why: "the audit does not depend on the parts that write and store it"},
	{pkg: "internal/config", may: []string{"internal/timespan"}, why: "everything is configured by it, so it can depend on nothing it configures"},
	{pkg: "internal/api", why: "the types on the wire are the same for server, client and command line; a change of them shows in docs/reference/openapi.json"},
	{pkg: "internal/jobs/runner", may: []string{"internal/access", "internal/counters", "internal/devices", "internal/devices/dispatch", "internal/jobs", "internal/jsonspan", "internal/timescale", "internal/timespan"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "fleetd/internal/fleet"},
		why:   "what begins on this node's devices does not depend on where jobs are stored and who created them"},
	{pkg: "internal/jobs/manager", may: []string{"internal/preflight", "internal/access", "internal/api", "internal/devices", "internal/devices/catalog", "internal/devices/dispatch", "internal/devices/registry", "internal/jobs", "internal/selector", "internal/timescale", "internal/timespan"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "fleetd/internal/fleet"},
		why:   "who may create a job, and when it goes on, does not depend on where it is stored and who sends"},
	{pkg: "internal/jobs", may: []string{"internal/api", "internal/devices", "internal/jsonspan", "internal/selector", "internal/timescale", "internal/timespan"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "fleetd/internal/fleet"},
		why:   "the rules of jobs are pure; who stores, sends and shows them, others know"},
	{pkg: "internal/recorder", may: []string{"internal/counters", "internal/devices"}, never: []string{"net/http", "database/sql", "github.com/nats-io"},
		why: "its records do not depend on the parts that write and read them"},
	{pkg: "internal/explain", may: []string{"internal/access", "internal/api", "internal/counters", "internal/devices", "internal/selector"}, never: []string{"net/http", "database/sql", "github.com/nats-io"},
		why: "causes follow from records and states, wherever these are kept and whatever shows them"},
	{pkg: "internal/trace", may: []string{"internal/access", "internal/api", "internal/audit", "internal/counters", "internal/devices", "internal/envelope", "internal/jsonspan", "internal/timescale"}, never: []string{"net/http", "database/sql", "github.com/nats-io"},
		why: "what an entry has, and how long a trace lasts, does not depend on what carries it"},
	{pkg: "internal/datadir", may: []string{"internal/credential", "internal/durable"}, why: "a node and the commands on its machine share the directory, and nothing else"},
	{pkg: "internal/backup", may: []string{"internal/config", "internal/credential", "internal/datadir", "internal/devices/registry", "internal/durable", "internal/store"}, why: "a backup is made of files, whether the node runs or not"},
	{pkg: "internal/apiclient", may: []string{"internal/api", "internal/datadir"}, why: "a client has nothing of the server but the types on the wire"},
	{pkg: "migrations", why: "the schema is data; old migrations must not change with today's code"},
	{pkg: "simulator/firmware", never: []string{"fleetd/internal", "fleetd/migrations", "fleetd/cmd"}, why: "a device that shares code with the server can only agree with it"},
	{pkg: "simulator", may: []string{"simulator/firmware"}, never: []string{"fleetd/internal", "fleetd/migrations", "fleetd/cmd"},
		why: "a simulator that shares code with the server can only agree with it"},
	{pkg: "internal/counters", why: "it counts and describes metrics without a metrics library, so that every part can have its own"},
	{pkg: "internal/stats", may: []string{"internal/counters", "internal/devices"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet"},
		why:   "it samples counters whatever counts, and adds up what other nodes have without knowing how they are asked"},
	{pkg: "internal/webhooks", may: []string{"internal/access", "internal/api", "internal/counters", "internal/credential", "internal/devices", "internal/egress", "internal/selector", "internal/timescale", "internal/timespan"},
		never: []string{"database/sql", "github.com/nats-io", "fleetd/internal/fleet"},
		why:   "it delivers events wherever they are kept, as the keys that the core judges"},
	{pkg: "internal/store/firmwarestore", may: []string{"internal/devices", "internal/firmware", "internal/store/database"},
		never: []string{"fleetd/internal/fleet"},
		why:   "it keeps the rows of images; their bytes are elsewhere"},
	{pkg: "internal/store/webhookstore", may: []string{"internal/devices", "internal/store/database", "internal/webhooks"},
		never: []string{"github.com/nats-io", "fleetd/internal/fleet"},
		why:   "it keeps webhooks; what is delivered, others know"},
	{pkg: "internal/tasks", why: "it runs and wakes goroutines, whatever they do: every package may use it"},
	{pkg: "internal/devices/catalog", may: []string{"internal/devices", "internal/jsonspan"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/devices/registry"},
		why:   "the content of a tool list does not depend on the device that has it"},
	{pkg: "internal/devices/speech", may: []string{"internal/access", "internal/counters", "internal/devices", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/opus", "internal/selector"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/devices/registry", "fleetd/internal/devices/catalog"},
		why:   "a conversation uses its device's line, not its identity and tools"},
	{pkg: "internal/devices/dispatch", may: []string{"internal/access", "internal/audit", "internal/counters", "internal/devices", "internal/jsonspan", "internal/mcpclient"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/admission"},
		why:   "a request takes one way, wherever it came from and whatever for"},
	{pkg: "internal/devices/admission", may: []string{"internal/access", "internal/audit", "internal/counters", "internal/devices", "internal/jsonspan", "internal/selector"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/dispatch"},
		why:   "who is let in is decided without knowing what is done with those who are in"},
	{pkg: "internal/devices/session", may: []string{"internal/counters", "internal/devices", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/mcpclient", "internal/timescale"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/dispatch", "fleetd/internal/devices/admission"},
		why:   "what is connected does not depend on what is done with it, nor on who may do it"},
	{pkg: "internal/devices/registry", may: []string{"internal/access", "internal/devices", "internal/durable", "internal/timescale"},
		never: []string{"database/sql", "github.com/nats-io", "net/http"},
		why:   "who the devices are is decided without knowing which of them is connected, and over which database and network"},
	{pkg: "internal/devices", may: []string{"internal/api", "internal/selector", "internal/access", "internal/jsonspan"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "github.com/eclipse-paho", "github.com/eclipse", "github.com/gorilla",
			"github.com/jackc", "modernc.org/sqlite", "fleetd/internal/fleet", "fleetd/internal/devices/registry"},
		why: "ids, records, errors and events are words that every part uses, also those that the core does not know"},
	{pkg: "internal/fleet", may: []string{"internal/devices/registry", "internal/selector", "internal/access", "internal/audit", "internal/devices", "internal/hello", "internal/envelope", "internal/mcpclient", "internal/jsonspan", "internal/counters", "internal/timescale"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "github.com/eclipse-paho", "github.com/eclipse", "github.com/gorilla",
			"github.com/jackc", "modernc.org/sqlite"},
		why: "the core states what it needs as interfaces; no transport, broker or database shows through it"},
	{pkg: "internal/bulk", may: []string{"internal/cleantext", "internal/api", "internal/access", "internal/devices", "internal/fleet", "internal/jsonspan", "internal/selector"},
		never: []string{"database/sql", "net/http"},
		why:   "files of devices are read and written without knowing who sends them and where the devices are kept"},
	{pkg: "internal/writequeue", may: []string{"internal/devices"}, why: "it orders the writes of any connection whatever they write; devices has the error of a full queue"},
	{pkg: "internal/connlimit", may: []string{"internal/counters"}, why: "it lets connections in and lists them, whatever they speak"},
	{pkg: "internal/opus", why: "the structure of a packet is a pure wire format"},
	{pkg: "internal/udpaudio", may: []string{"internal/counters", "internal/envelope", "internal/opus"}, why: "it moves and seals packets; whose they are, the front end and the core know"},
	{pkg: "internal/wsdevice", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/envelope", "internal/hello", "internal/credential", "internal/connlimit", "internal/writequeue"},
		why: "an adapter depends on the core and the wire, never another adapter"},
	{pkg: "internal/mqttdevice", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/hello", "internal/credential", "internal/connlimit", "internal/writequeue", "internal/udpaudio"},
		why: "an adapter depends on the core and the wire; audio over UDP is the other plane of its own transport"},
	{pkg: "internal/gatewayapi", may: []string{"internal/counters", "internal/access", "internal/devices", "internal/fleet", "internal/credential", "internal/connlimit", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/upstream", may: []string{"internal/counters", "internal/access", "internal/devices", "internal/fleet", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/credential"}, why: "an adapter depends on the core and the wire, never another adapter"},
	{pkg: "examples/echo", why: "a voice service uses NATS and the documented subjects, and nothing else of fleetd"},
	{pkg: "internal/attest", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/credential"}, why: "it judges proofs of hardware by the operator's list; who brings them, and where the list lies, others know"},
	{pkg: "internal/rollout", may: []string{"internal/access", "internal/counters", "internal/devices", "internal/devices/catalog", "internal/jobs", "internal/preflight", "internal/timescale"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet"},
		why:   "it moves firmware tasks on, whoever sees the check, the download or the connection"},
	{pkg: "internal/provision", may: []string{"internal/rollout", "internal/counters", "internal/devices", "internal/fleet", "internal/credential", "internal/attest", "internal/connlimit", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/vision", may: []string{"internal/cleantext", "internal/counters", "internal/devices", "internal/fleet", "internal/credential", "internal/connlimit", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/precompressed", why: "it serves bytes, whatever they are"},
	{pkg: "internal/console", may: []string{"internal/precompressed"}, why: "the console is files for browsers; what it shows comes from the API, with a key"},
	{pkg: "internal/restapi", may: []string{"internal/explain", "internal/trace", "internal/cleantext", "internal/precompressed", "internal/api", "internal/firmware", "internal/jobs", "internal/stats", "internal/timespan", "internal/bulk", "internal/devices/registry", "internal/selector", "internal/access", "internal/audit", "internal/devices", "internal/fleet", "internal/envelope", "internal/credential", "internal/attest", "internal/connlimit", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/finder", why: "it finds documents by their words, without their rights and origin"},
	{pkg: "internal/mcpserver", may: []string{"internal/audit", "internal/cleantext", "internal/credential", "internal/api", "internal/jobs", "internal/timespan", "internal/counters", "internal/finder", "internal/selector", "internal/access", "internal/devices", "internal/fleet", "internal/connlimit", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/oauth", may: []string{"internal/access", "internal/cleantext", "internal/connlimit", "internal/credential", "internal/devices", "internal/egress", "internal/fleet", "internal/mcpserver", "internal/selector"},
		never: []string{"database/sql", "github.com/nats-io"},
		why:   "it lets hosts into MCP, whose addresses it has to know; who may do what is decided in access, and others store it"},
	{pkg: "internal/store/database", may: []string{"internal/devices", "internal/selector", "internal/timescale", "migrations"},
		why: "it opens a database for the parts of the store, and depends on none"},
	{pkg: "internal/store/records", may: []string{"internal/devices", "internal/selector", "internal/store/database"},
		why: "it reads, and depends on nothing that writes"},
	{pkg: "internal/store/jobstore", may: []string{"internal/access", "internal/api", "internal/devices", "internal/jobs", "internal/store/database"},
		never: []string{"net/http", "github.com/nats-io", "fleetd/internal/fleet"},
		why:   "it applies the rules of jobs to rows; what is done on devices, others know"},
	{pkg: "internal/store", may: []string{"internal/selector", "internal/devices/registry", "internal/access", "internal/audit", "internal/devices", "internal/fleet", "migrations"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/cluster/lease", may: []string{"internal/counters", "internal/devices", "internal/timescale"}, why: "nodes are lost by the database's word, whatever the transport between them"},
	{pkg: "internal/cluster", may: []string{"internal/counters", "internal/devices/registry", "internal/access", "internal/devices", "internal/fleet", "internal/credential", "internal/jsonspan", "internal/timescale"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/events", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/envelope", "internal/jsonspan"}, why: "an adapter depends on the core, never another adapter"},
	{pkg: "internal/node", may: []string{"internal/counters", "internal/devices/registry", "internal/access", "internal/audit", "internal/explain", "internal/recorder", "internal/trace", "internal/config", "internal/hello", "internal/envelope", "internal/mcpclient", "internal/credential",
		"internal/devices", "internal/fleet", "internal/wsdevice", "internal/provision", "internal/vision", "internal/restapi", "internal/console", "internal/store",
		"internal/cluster", "internal/cluster/lease", "internal/events", "internal/datadir", "internal/mqttdevice", "internal/udpaudio", "internal/gatewayapi",
		"internal/upstream", "internal/connlimit", "internal/attest", "internal/mcpserver", "internal/timescale", "internal/durable", "internal/jobs", "internal/jobs/manager", "internal/jobs/runner", "internal/store/jobstore", "internal/stats", "internal/store/webhookstore", "internal/webhooks", "internal/egress", "internal/oauth", "internal/firmware", "internal/rollout", "internal/store/firmwarestore", "migrations"},
		why: "it puts everything together, and only the command may be above it"},
	{pkg: "internal/preflight", may: []string{"internal/espimage"}, why: "whether a device could get an image follows from what is known of both, wherever that is kept"},
	{pkg: "internal/firmware", may: []string{"internal/access", "internal/api", "internal/cleantext", "internal/devices", "internal/durable", "internal/espimage", "internal/preflight", "internal/selector"},
		never: []string{"database/sql", "fleetd/internal/fleet"},
		why:   "images are kept and judged without knowing who sends them and who could get them"},
	{pkg: "internal/espimage", may: []string{"internal/selector"}, why: "it reads files, and knows neither devices nor a store; selector has the rule of versions"},
	{pkg: "cmd/fleetd", may: []string{"internal/espimage", "internal/jsonspan", "internal/firmware", "internal/preflight", "internal/api", "internal/jobs", "internal/cleantext", "internal/backup", "internal/datadir", "internal/timespan", "internal/config", "internal/node", "internal/apiclient", "internal/audit", "internal/selector"},
		why: "the command parses, calls and reports; what it needs of the rest, the node gives it; an exported audit it verifies itself, so that no node has to be trusted"},
}

// testSupport are the packages that only tests and benchmarks use. They may import anything; nothing above may import them.
var testSupport = []string{"internal/gobuild", "internal/goldentest", "internal/devicetest", "internal/espimage/imagetest", "internal/store/storetest", "internal/fleettest", "internal/jsontest", "internal/natstest", "internal/racetest", "internal/repotest"}

// goPackage is what `go list -json` prints of a package. Imports and Deps leave tests out.
type goPackage struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	return goList[goPackage](t, "../..", nil, "-json=ImportPath,Imports,Deps", "./...")
}

// goList runs `go list` in dir with these variables besides, and returns the packages that it prints as JSON.
func goList[T any](t *testing.T, dir string, environment []string, args ...string) (packages []T) {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", append([]string{"list"}, args...)...)
	command.Dir, command.Env = dir, append(os.Environ(), environment...)
	var stderr strings.Builder
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p T
		switch err := decoder.Decode(&p); {
		case errors.Is(err, io.EOF):
			return packages
		case err != nil:
			t.Fatalf("read the answer of go list: %v", err)
		}
		packages = append(packages, p)
	}
}

func TestImports(t *testing.T) {
	for _, fault := range importFaults(listPackages(t), importRules, testSupport) {
		t.Error(fault)
	}
}

// importFaults checks packages against rules and returns a sentence for everything that is wrong, the rules included.
func importFaults(packages []goPackage, rules []rule, support []string) []string {
	var faults []string
	used := make(map[string]bool)
	for _, p := range packages {
		name := strings.TrimPrefix(p.ImportPath, module)
		if i := slices.IndexFunc(support, func(s string) bool { return within(name, s) }); i >= 0 {
			used[support[i]] = true
			continue
		}
		i := slices.IndexFunc(rules, func(r rule) bool { return within(name, r.pkg) })
		if i < 0 {
			faults = append(faults, name+" has no rule in importRules: add what it may import, and why")
			continue
		}
		used[rules[i].pkg] = true
		faults = append(faults, rules[i].faults(name, p, support)...)
	}
	for _, r := range rules {
		if !used[r.pkg] {
			faults = append(faults, "there is a rule for "+r.pkg+", which does not exist")
		}
		for _, may := range r.may {
			if !slices.ContainsFunc(rules, func(o rule) bool { return o.pkg == may }) {
				faults = append(faults, "the rule for "+r.pkg+" allows "+may+", which has no rule itself")
			}
		}
	}
	for _, s := range support {
		if !used[s] {
			faults = append(faults, s+" counts as test support but does not exist")
		}
	}
	return faults
}

// faults checks one package against its rule.
func (r rule) faults(name string, p goPackage, support []string) []string {
	var faults []string
	for _, path := range p.Imports {
		ours, isOurs := strings.CutPrefix(path, module)
		switch {
		case within(path, "testing"):
			faults = append(faults, name+" imports "+path+": production code does not carry the test framework")
		case !isOurs || within(ours, r.pkg) || ours == "internal/clock" || ours == "internal/tasks":
		case !slices.ContainsFunc(r.may, func(m string) bool { return within(ours, m) }):
			faults = append(faults, name+" imports "+ours+": "+r.why)
		}
	}
	for _, path := range p.Deps {
		if slices.ContainsFunc(r.never, func(n string) bool { return within(path, n) }) {
			faults = append(faults, name+" reaches "+path+": "+r.why)
		}
		ours, isOurs := strings.CutPrefix(path, module)
		if isOurs && slices.ContainsFunc(support, func(s string) bool { return within(ours, s) }) {
			faults = append(faults, name+" reaches "+ours+": production code does not carry test support")
		}
	}
	return faults
}

// within reports whether path is tree or lies below it.
func within(path, tree string) bool {
	return path == tree || strings.HasPrefix(path, tree+"/")
}

func TestImportFaults(t *testing.T) {
	rules := []rule{
		{pkg: "core", never: []string{"net/http"}, why: "core is pure"},
		{pkg: "adapter", may: []string{"core"}, why: "adapters are apart"},
		{pkg: "other", may: []string{"core"}, why: "adapters are apart"},
	}
	good := []goPackage{
		{ImportPath: module + "core", Imports: []string{"fmt", module + "core/part"}},
		{ImportPath: module + "core/part"},
		{ImportPath: module + "adapter", Imports: []string{"net/http", module + "core/part"}},
		{ImportPath: module + "other"},
		{ImportPath: module + "kit", Imports: []string{"testing", module + "adapter"}},
	}
	if faults := importFaults(good, rules, []string{"kit"}); len(faults) != 0 {
		t.Errorf("nothing is wrong, yet: %q", faults)
	}
	cases := []struct {
		name    string
		change  func(packages []goPackage) []goPackage
		rules   []rule
		support []string
		want    string
	}{
		{"adapter to adapter", func(p []goPackage) []goPackage { p[2].Imports = []string{module + "other"}; return p }, rules, []string{"kit"},
			"adapter imports other: adapters are apart"},
		{"core to adapter from below", func(p []goPackage) []goPackage { p[1].Imports = []string{module + "adapter"}; return p }, rules, []string{"kit"},
			"core/part imports adapter: core is pure"},
		{"forbidden through others", func(p []goPackage) []goPackage { p[0].Deps = []string{"net/http/internal"}; return p }, rules, []string{"kit"},
			"core reaches net/http/internal: core is pure"},
		{"testing", func(p []goPackage) []goPackage { p[2].Imports = []string{"testing/fstest"}; return p }, rules, []string{"kit"},
			"adapter imports testing/fstest: production code does not carry the test framework"},
		{"test support", func(p []goPackage) []goPackage { p[3].Deps = []string{module + "kit"}; return p }, rules, []string{"kit"},
			"other reaches kit: production code does not carry test support"},
		{"no rule", func(p []goPackage) []goPackage { return append(p, goPackage{ImportPath: module + "new"}) }, rules, []string{"kit"},
			"new has no rule in importRules: add what it may import, and why"},
		{"rule without a package", func(p []goPackage) []goPackage { return slices.Delete(p, 3, 4) }, rules, []string{"kit"},
			"there is a rule for other, which does not exist"},
		{"permission without a rule", func(p []goPackage) []goPackage { return p },
			append(slices.Clone(rules[:2]), rule{pkg: "other", may: []string{"gone"}}), []string{"kit"}, "the rule for other allows gone, which has no rule itself"},
		{"support that is gone", func(p []goPackage) []goPackage { return p }, rules, []string{"kit", "kit2"},
			"kit2 counts as test support but does not exist"},
	}
	for _, tc := range cases {
		packages := slices.Clone(good)
		if faults := importFaults(tc.change(packages), tc.rules, tc.support); !slices.Equal(faults, []string{tc.want}) {
			t.Errorf("%s: %q, want %q", tc.name, faults, tc.want)
		}
	}
}
