package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "fleetd/"

// rule says what one package, with the packages below it, may import.
type rule struct {
	pkg string
	// may are the packages of ours it may import directly; what lies below pkg itself is its own affair.
	may []string
	// never are import paths it may reach neither directly nor through others, with everything below them.
	never []string
	why   string
}

// importRules cover every package that is part of the product. The core owns the interfaces; adapters stand around it
// and do not know each other.
var importRules = []rule{
	{pkg: "internal/jsonspan", why: "it reads JSON text and knows nothing of what stands in it; every wire package builds on it"},
	{pkg: "internal/hello", may: []string{"internal/jsonspan"}, why: "the handshake documents are pure wire formats, which any side must be able to use"},
	{pkg: "internal/envelope", may: []string{"internal/jsonspan"}, why: "the outer message and its frames are pure wire formats, which any side must be able to use"},
	{pkg: "internal/mcpclient", may: []string{"internal/jsonspan"}, why: "it speaks MCP to one peer over a function and knows no device, session or socket"},
	{pkg: "internal/timescale", why: "it scales intervals and depends on nothing that has them"},
	{pkg: "internal/durable", why: "it writes files, and knows nothing of what is in them"},
	{pkg: "internal/credential", why: "tokens are minted and verified from bytes; who owns them is decided elsewhere"},
	{pkg: "internal/timespan", why: "it reads durations, whatever they are for"},
	{pkg: "internal/selector", may: []string{"internal/timespan"}, why: "one grammar selects devices everywhere, so it depends on nothing that has them"},
	{pkg: "internal/access", may: []string{"internal/jsonspan", "internal/selector"}, why: "who may do what is decided from what it is told; every way in must be able to ask it"},
	{pkg: "internal/audit", may: []string{"internal/jsonspan"}, why: "the record of who did what is kept apart from whoever writes and stores it"},
	{pkg: "internal/config", may: []string{"internal/timespan"}, why: "everything is configured by it, so it can depend on nothing it configures"},
	{pkg: "internal/apiclient", may: []string{"internal/durable"}, why: "a client that shares types with the server would hide every change of the protocol between them"},
	{pkg: "migrations", why: "the schema is data; old migrations must not change with today's code"},
	{pkg: "simulator", why: "a simulator that shares code with the server can only agree with it"},
	{pkg: "internal/counters", why: "it counts, and knows no metrics library"},
	{pkg: "internal/tasks", why: "it runs goroutines, and knows nothing of what they do"},
	{pkg: "internal/devices/catalog", may: []string{"internal/devices", "internal/jsonspan"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/devices/registry"},
		why:   "what a tool list says does not depend on who has it"},
	{pkg: "internal/devices/speech", may: []string{"internal/access", "internal/counters", "internal/devices", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/opus", "internal/selector", "internal/tasks"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/devices/registry", "fleetd/internal/devices/catalog"},
		why:   "a conversation knows its device's line, not who it is and what its tools are"},
	{pkg: "internal/devices/dispatch", may: []string{"internal/access", "internal/audit", "internal/counters", "internal/devices", "internal/jsonspan", "internal/mcpclient", "internal/tasks"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/admission"},
		why:   "a request takes one way, wherever it came from and whatever for"},
	{pkg: "internal/devices/admission", may: []string{"internal/access", "internal/audit", "internal/counters", "internal/devices", "internal/jsonspan", "internal/selector"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/dispatch"},
		why:   "who is let in is decided without knowing what is done with those who are in"},
	{pkg: "internal/devices/session", may: []string{"internal/counters", "internal/devices", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/mcpclient", "internal/tasks", "internal/timescale"},
		never: []string{"database/sql", "github.com/nats-io", "net/http", "fleetd/internal/fleet", "fleetd/internal/devices/dispatch", "fleetd/internal/devices/admission"},
		why:   "what is connected does not depend on what is done with it, nor on who may do it"},
	{pkg: "internal/devices/registry", may: []string{"internal/access", "internal/devices", "internal/durable", "internal/timescale"},
		never: []string{"database/sql", "github.com/nats-io", "net/http"},
		why:   "who the devices are is decided without knowing which of them is connected, and over which database and network"},
	{pkg: "internal/devices", may: []string{"internal/selector", "internal/access", "internal/jsonspan"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "github.com/eclipse-paho", "github.com/eclipse", "github.com/gorilla",
			"github.com/jackc", "modernc.org/sqlite", "fleetd/internal/fleet", "fleetd/internal/devices/registry"},
		why: "ids, records, errors and events are words that every part uses, also those that the core does not know"},
	{pkg: "internal/fleet", may: []string{"internal/devices/registry", "internal/selector", "internal/access", "internal/audit", "internal/devices", "internal/hello", "internal/envelope", "internal/mcpclient", "internal/jsonspan", "internal/counters", "internal/tasks", "internal/timescale"},
		never: []string{"database/sql", "net/http", "github.com/nats-io", "github.com/eclipse-paho", "github.com/eclipse", "github.com/gorilla",
			"github.com/jackc", "modernc.org/sqlite"},
		why: "the core states what it needs as interfaces; no transport, broker or database shows through it"},
	{pkg: "internal/bulk", may: []string{"internal/access", "internal/devices", "internal/fleet", "internal/jsonspan", "internal/selector"},
		never: []string{"database/sql", "net/http"},
		why:   "files of devices are read and written without knowing who sends them and where the devices are kept"},
	{pkg: "internal/outbox", why: "it orders the writes of any connection and knows none of them"},
	{pkg: "internal/lobby", why: "it lets connections in and lists them, whatever they speak"},
	{pkg: "internal/opus", why: "the structure of a packet is a pure wire format"},
	{pkg: "internal/udpaudio", may: []string{"internal/tasks", "internal/envelope", "internal/opus"}, why: "it moves and seals packets; whose they are, the front end and the core know"},
	{pkg: "internal/wsdevice", may: []string{"internal/counters", "internal/tasks", "internal/devices", "internal/fleet", "internal/envelope", "internal/hello", "internal/credential", "internal/lobby", "internal/outbox"},
		why: "an adapter knows the core and the wire, never another adapter"},
	{pkg: "internal/mqttdevice", may: []string{"internal/counters", "internal/tasks", "internal/devices", "internal/fleet", "internal/hello", "internal/credential", "internal/lobby", "internal/outbox", "internal/udpaudio"},
		why: "an adapter knows the core and the wire; audio over UDP is the other plane of its own transport"},
	{pkg: "internal/gatewayapi", may: []string{"internal/counters", "internal/access", "internal/devices", "internal/fleet", "internal/credential", "internal/lobby", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/upstream", may: []string{"internal/counters", "internal/tasks", "internal/access", "internal/devices", "internal/fleet", "internal/envelope", "internal/hello", "internal/jsonspan", "internal/credential"}, why: "an adapter knows the core and the wire, never another adapter"},
	{pkg: "examples/echo", why: "a voice service knows NATS and the documented subjects, and nothing of fleetd"},
	{pkg: "internal/attest", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/credential"}, why: "it judges proofs of hardware by the operator's list; who brings them, and where the list lies, others know"},
	{pkg: "internal/provision", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/credential", "internal/attest", "internal/lobby", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/vision", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/credential", "internal/lobby", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/restapi", may: []string{"internal/timespan", "internal/bulk", "internal/devices/registry", "internal/selector", "internal/access", "internal/audit", "internal/devices", "internal/fleet", "internal/envelope", "internal/credential", "internal/attest", "internal/lobby", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/finder", why: "it finds documents by their words, and knows neither who may see them nor where they come from"},
	{pkg: "internal/mcpserver", may: []string{"internal/counters", "internal/finder", "internal/tasks", "internal/selector", "internal/access", "internal/devices", "internal/fleet", "internal/lobby", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/store/database", may: []string{"internal/devices", "internal/selector", "internal/timescale", "migrations"},
		why: "it opens a database for the parts of the store, and knows none"},
	{pkg: "internal/store/records", may: []string{"internal/devices", "internal/selector", "internal/store/database"},
		why: "it reads, and knows nobody who writes"},
	{pkg: "internal/store", may: []string{"internal/selector", "internal/devices/registry", "internal/access", "internal/audit", "internal/devices", "internal/fleet", "migrations"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/cluster", may: []string{"internal/counters", "internal/tasks", "internal/devices/registry", "internal/access", "internal/devices", "internal/fleet", "internal/credential", "internal/jsonspan", "internal/timescale"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/events", may: []string{"internal/counters", "internal/devices", "internal/fleet", "internal/envelope", "internal/jsonspan"}, why: "an adapter knows the core, never another adapter"},
	{pkg: "internal/node", may: []string{"internal/counters", "internal/tasks", "internal/devices/registry", "internal/access", "internal/audit", "internal/config", "internal/hello", "internal/envelope", "internal/mcpclient", "internal/credential",
		"internal/devices", "internal/fleet", "internal/wsdevice", "internal/provision", "internal/vision", "internal/restapi", "internal/store",
		"internal/cluster", "internal/events", "internal/apiclient", "internal/mqttdevice", "internal/udpaudio", "internal/gatewayapi",
		"internal/upstream", "internal/lobby", "internal/attest", "internal/mcpserver", "internal/timescale", "internal/durable", "migrations"},
		why: "it puts everything together, and only the command may be above it"},
	{pkg: "cmd/fleetd", may: []string{"internal/timespan", "internal/config", "internal/node", "internal/apiclient", "internal/audit", "internal/selector"},
		why: "the command parses, calls and reports; what it needs of the rest, the node gives it; an exported audit it verifies itself, so that no node has to be trusted"},
}

// testSupport are the packages that only tests and benchmarks use. They may import anything; nothing above may import them.
var testSupport = []string{"internal/devicetest", "internal/store/storetest", "internal/fleettest", "internal/fleetbench", "internal/fleetsim", "internal/jsontest"}

// goPackage is what `go list -json` says of a package. Imports and Deps leave tests out.
type goPackage struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func listPackages(t *testing.T) []goPackage {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,Deps", "./...")
	command.Dir = "../.."
	var stderr strings.Builder
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var packages []goPackage
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
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
		case !isOurs || within(ours, r.pkg):
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
