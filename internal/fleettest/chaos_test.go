package fleettest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// Sizes of the chaos: devices on either transport, and in long runs that many times as many.
const (
	chaosMQTT      = 80
	chaosWebSocket = 40
	chaosCallers   = 8
	chaosLong      = 10 * time.Minute // a run that is long
	chaosLongSize  = 5 / 2.
)

// TestChaos breaks everything between three nodes, their devices, NATS and the
// database, for FLEETD_TEST_CHAOS (60s), in the order that FLEETD_TEST_SEED
// (1, or random) gives, and then checks every invariant. `make verify` takes the
// seed from the commit; `make chaos` runs for five minutes.
func TestChaos(t *testing.T) {
	long(t)
	seed := uint64(1)
	switch text := os.Getenv("FLEETD_TEST_SEED"); text {
	case "":
	case "random":
		seed = rand.Uint64N(1_000_000)
	default:
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("FLEETD_TEST_SEED: %v", err)
		}
	}
	lasts := time.Minute
	if text := os.Getenv("FLEETD_TEST_CHAOS"); text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatalf("FLEETD_TEST_CHAOS: %v", err)
		}
	}
	p := programs
	if tags := os.Getenv("FLEETD_TEST_TAGS"); tags != "" {
		p = built(t, tags)
	}
	t.Logf("seed %d, %v; again with FLEETD_TEST_SEED=%d FLEETD_TEST_CHAOS=%v", seed, lasts, seed, lasts)
	for _, violation := range chaos(t, p, seed, lasts, time.Minute) {
		t.Error(violation)
	}
}

// TestChaosNoticesABrokenFence runs it with nodes that keep a device when
// another node claims it: a check that cannot fail shows nothing.
func TestChaosNoticesABrokenFence(t *testing.T) {
	long(t)
	violations := chaos(t, built(t, "brokenfence"), 1, 10*time.Second, 15*time.Second)
	if len(violations) == 0 {
		t.Fatal("nodes that keep devices of other nodes were not noticed")
	}
	t.Logf("noticed, as wanted: %.300s", violations[0])
}

// storm is one run of the chaos.
type storm struct {
	*Cluster
	t          *testing.T
	random     *rand.Rand
	ids        []string // of all devices
	sims       []*Simulation
	load       *Load
	lasts      time.Duration
	baseline   float64 // goroutines of a node before any device came, at most
	checking   string  // the invariant
	violations []string
	done       map[string]int // faults by name
	decisions  *decisions
	jobs       *jobWork
	js         jetstream.JetStream
}

// invariants hold when everything is restored and the fleet is at rest. The order
// matters: account ends the devices, and quiet looks at what they leave. Each
// new promise about faults joins this list.
var invariants = []struct {
	name  string
	check func(*storm)
}{
	{"nodes, calls and database agree on who holds each device", (*storm).agree},
	{"what was decided holds, and nothing old is back", (*storm).decided},
	{"every job ends", (*storm).finished},
	{"callers, jobs and devices agree on every call", (*storm).account},
	{"nothing is left when the devices are gone", (*storm).quiet},
	{"events are kept", (*storm).kept},
}

func (s *storm) check() {
	for _, i := range invariants {
		s.checking = i.name
		i.check(s)
	}
}

func (s *storm) violated(format string, a ...any) {
	s.violations = append(s.violations, s.checking+": "+fmt.Sprintf(format, a...))
}

// built are the programs with a build tag.
func built(t *testing.T, tag string) Programs {
	p, err := Build(t.TempDir(), tag)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// chaos breaks things for a while and returns what did not hold. A fleet that
// does not come to rest within patience afterwards is not looked at any closer.
func chaos(t *testing.T, p Programs, seed uint64, lasts, patience time.Duration) []string {
	c := p.StartCluster(t, ClusterOptions{Seed: seed, Args: []string{"--drain-window", "2s"}, Stepped: true})
	s := &storm{Cluster: c, t: t, lasts: lasts, random: rand.New(rand.NewPCG(seed, 0)), checking: "the fleet comes to rest", done: map[string]int{}}
	for _, n := range c.Nodes {
		s.baseline = max(s.baseline, n.Metric(t, "go_goroutines"))
	}
	c.Nodes[0].StepClock(t, -2500*time.Millisecond)
	c.Nodes[2].StepClock(t, 2500*time.Millisecond)
	mqtt, webSocket := chaosMQTT, chaosWebSocket
	if lasts >= chaosLong {
		mqtt, webSocket = chaosMQTT*chaosLongSize, chaosWebSocket*chaosLongSize
	}
	const mqttBase, wsBase = "02:c0:00:00:00:00", "02:c1:00:00:00:00"
	s.sims = []*Simulation{
		p.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(mqtt), "--mac-base", mqttBase, "--seed", fmt.Sprint(seed), "--profile", "fw-2.4,robot,fw-2.1",
			"--reconnect", "500ms", "--reconnect-jitter", "1s", "--time-scale", "0.05"),
		p.Simulate(t, c.OTA, "--transport", "websocket", "--devices", fmt.Sprint(webSocket), "--mac-base", wsBase, "--seed", fmt.Sprint(seed+1), "--wake", "1s", "--time-scale", "0.05"),
	}
	revoked := p.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(chaosRevoked), "--mac-base", revokedBase+"00", "--seed", fmt.Sprint(seed+2), "--reconnect", "500ms", "--time-scale", "0.05")
	for i := range mqtt {
		s.ids = append(s.ids, fmt.Sprintf("02:c0:00:00:00:%02x", i))
	}
	for i := range webSocket {
		s.ids = append(s.ids, fmt.Sprintf("02:c1:00:00:00:%02x", i))
	}
	c.AwaitReady(t, len(s.ids)+chaosRevoked, time.Minute)
	s.load = c.StartLoad(t, s.ids, LoadOptions{Seed: seed, Callers: chaosCallers, Pause: 20 * time.Millisecond, Timeout: 4 * time.Second})
	s.decisions = s.decide(seed)
	s.jobs = s.work(seed)

	for end := time.Now().Add(lasts); time.Now().Before(end); {
		s.strike()
		time.Sleep(time.Duration(200+s.random.IntN(1000)) * time.Millisecond) // between two faults
	}
	s.decisions.end()
	s.jobs.end()
	c.Mend()
	c.StepDatabase(-time.Hour) // and so it stays
	s.decisions.revokeTheRest()
	for i := range c.Nodes { // everybody moves once more, and no node is notified
		c.MQTT.Desert(i)
		c.HTTP.Desert(i)
	}
	if s.rest(patience) {
		s.load.Stop()
		s.check()
	}
	_ = revoked.Report(t) // ends it
	t.Logf("faults: %v", s.done)
	t.Logf("calls: %v", s.load.Outcomes())
	t.Logf("jobs: %d, %d tasks; %v", len(s.jobs.all), s.jobs.tasks, s.jobs.verbs)
	return s.violations
}

// strike breaks one thing, and makes sure that it is restored.
func (s *storm) strike() {
	node := s.random.IntN(len(s.Nodes))
	lasts := time.Duration(500+s.random.IntN(6000)) * time.Millisecond
	breaks := func(name string, w *Wire, server int, f Fault) {
		s.done[name]++
		w.Break(server, f)
		repair := time.AfterFunc(lasts, func() { w.Break(server, None) })
		s.t.Cleanup(func() { repair.Stop() })
	}
	switch roll := s.random.IntN(100); {
	case roll < 15:
		breaks("NATS cut", s.NATS[node], 0, Cut)
	case roll < 22:
		breaks("NATS stalled", s.NATS[node], 0, Stalled)
	case roll < 30:
		s.stepClocks(node)
	case roll < 40:
		breaks("SQL cut", s.SQL[node], 0, Cut)
	case roll < 48:
		breaks("SQL stalled", s.SQL[node], 0, Stalled)
	case roll < 56:
		breaks("MQTT cut", s.MQTT, node, Cut)
	case roll < 62:
		breaks("MQTT stalled", s.MQTT, node, Stalled)
	case roll < 67:
		breaks("HTTP cut", s.HTTP, node, Cut)
	case roll < 72:
		breaks("HTTP stalled", s.HTTP, node, Stalled)
	case roll < 80:
		s.done["MQTT deserted"]++
		s.MQTT.Desert(node)
	case roll < 86:
		s.done["HTTP deserted"]++
		s.HTTP.Desert(node)
	case roll < 89:
		s.loseStreams()
	case roll < 93:
		s.staleStart(node, lasts)
	case roll < 95:
		s.done["frozen"]++
		up := s.load.Down(node)
		s.Nodes[node].Freeze(s.t)
		time.Sleep(lasts) // the fault
		s.Nodes[node].Thaw(s.t)
		time.AfterFunc(time.Second, up) // it has to catch up
	case roll < 96:
		s.allAway()
	case roll < 98:
		s.restart("killed", node, s.Nodes[node].Kill)
	default:
		s.restart("restarted", node, s.Nodes[node].Stop)
	}
}

// stepClocks sets the clock of a node, or of the database, an hour forwards, back or right.
func (s *storm) stepClocks(node int) {
	by := time.Duration(s.random.IntN(3)-1) * time.Hour
	if s.random.IntN(2) == 0 {
		s.done["database's clock stepped"]++
		s.StepDatabase(by)
		return
	}
	s.done["clock stepped"]++
	s.Nodes[node].StepClock(s.t, by)
}

// allAway takes the database, or NATS, from all nodes, in a long run for half a minute.
func (s *storm) allAway() {
	wires, name := s.SQL, "database away"
	if s.random.IntN(2) == 0 {
		wires, name = s.NATS, "NATS away"
	}
	s.done[name]++
	for _, w := range wires {
		w.Break(0, Cut)
	}
	time.Sleep(min(s.lasts/6, 30*time.Second)) // the fault
	for _, w := range wires {
		w.Break(0, None)
	}
}

func (s *storm) restart(name string, node int, end func(testing.TB)) {
	s.done[name]++
	up := s.load.Down(node)
	end(s.t)
	s.NATS[node].Break(0, None) // a node that cannot reach anything starts late
	s.SQL[node].Break(0, None)
	s.Nodes[node].Run(s.t)
	up()
}

// rest waits until every device is held once, and then for 2 s of quiet.
func (s *storm) rest(patience time.Duration) bool {
	limit := time.Now().Add(patience)
	still := time.Now()
	for time.Since(still) < 2*time.Second {
		held := s.Held(s.t)
		if held != len(s.ids) {
			still = time.Now()
		}
		if time.Now().After(limit) {
			s.violated("%d sessions of %d devices", held, len(s.ids))
			return false
		}
		time.Sleep(100 * time.Millisecond)
	}
	return true
}

// agree compares what every node reports of every device with what the others
// report, what a call shows, and what the database has. A row that is older than the
// stored one, whose node had a clock that was ahead, is written again after some seconds.
func (s *storm) agree() {
	s.eventually("lists and calls agree", func() string { // a device may move between the list and the call
		names, wrong := s.listed()
		if wrong != "" {
			return wrong
		}
		for _, id := range s.ids {
			for at, n := range s.Nodes {
				r, err := n.Volume(s.t, id, 5*time.Second)
				s.load.count(id, err == nil && !r.IsError)
				if err != nil || r.IsError || !strings.Contains(names[id], " "+r.Node+" ") {
					return fmt.Sprintf("%s via node-%d: answered by %q, %v; it is %s", id, at, r.Node, err, names[id])
				}
			}
		}
		return ""
	})
	want := len(s.ids)
	s.eventually("the database agrees", func() string {
		online, history := s.DB.Count(s.t, "SELECT count(*) FROM presence p JOIN nodes n ON n.node = p.node WHERE p.online"), s.DB.Count(s.t, "SELECT count(DISTINCT device) FROM catalog_history WHERE device NOT LIKE '"+revokedBase+"%'")
		if online == want && history == want {
			return ""
		}
		var rows []string
		for i := range s.Nodes {
			rows = append(rows, fmt.Sprintf("node-%d has %d leases and %d rows online", i, s.DB.Count(s.t, "SELECT count(*) FROM nodes WHERE node = $1", fmt.Sprint("node-", i)),
				s.DB.Count(s.t, "SELECT count(*) FROM presence WHERE online AND node = $1", fmt.Sprint("node-", i))))
		}
		return fmt.Sprintf("%d rows online of nodes that live, and history of %d devices, want %d; %s", online, history, want, strings.Join(rows, ", "))
	})
}

// listed returns where each device is, by what all nodes report, and the first of it that is wrong.
func (s *storm) listed() (names map[string]string, wrong string) {
	names = map[string]string{}
	for at, n := range s.Nodes {
		list, err := apiclient.Collect(n.Devices(s.t.Context(), nil))
		list = slices.DeleteFunc(list, func(d api.Device) bool { return strings.HasPrefix(d.ID, revokedBase) })
		if err != nil || len(list) != len(s.ids) {
			return names, fmt.Sprintf("node-%d lists %d devices, %v", at, len(list), err)
		}
		for _, d := range list {
			name := fmt.Sprintf("%s %s session %s", d.State, d.Node, d.SessionID)
			if other, ok := names[d.ID]; d.State != "online" || ok && other != name {
				return names, fmt.Sprintf("%s is %s for node-%d, and %q for another", d.ID, name, at, other)
			}
			names[d.ID] = name
		}
	}
	return names, ""
}

// account compares the answers that callers got with what the devices did.
func (s *storm) account() {
	l := s.load
	var reports []Report
	for _, sim := range s.sims {
		r := sim.Report(s.t)
		reports = append(reports, r)
		if r.Totals.DuplicateCallIDs != 0 || r.Totals.Crashes != 0 {
			s.violated("%d call ids were executed twice, %d devices crashed", r.Totals.DuplicateCallIDs, r.Totals.Crashes)
		}
		for _, d := range r.Devices {
			calls := int(d.CallsTotal)
			for _, n := range d.Markers { // of jobs
				calls -= int(n)
			}
			if calls > l.issued[d.ID] || calls < l.answered[d.ID] {
				s.violated("%s executed %d calls; %d were made, %d answered", d.ID, calls, l.issued[d.ID], l.answered[d.ID])
			}
			stored := s.DB.Count(s.t, "SELECT count(*) FROM presence p JOIN catalogs c ON c.sha256 = p.catalog JOIN catalog_history h ON h.device = p.device AND h.catalog = p.catalog WHERE p.device = $1 AND p.catalog = $2", d.ID, d.CatalogSHA256)
			if stored == 0 {
				s.violated("%s has the tool list %s, which is not what the database has", d.ID, d.CatalogSHA256)
			}
		}
	}
	if s.jobs != nil {
		outcomes, wrong := s.jobs.check(s.t, reports...)
		for _, fault := range wrong {
			s.violated("%s", fault)
		}
		if outcomes["ok"] == 0 {
			s.violated("no task succeeded: %v", outcomes)
		}
		s.t.Logf("tasks: %v", outcomes)
	}
	for _, lists := range [][]string{l.slow, l.wrong} {
		s.violations = append(s.violations, lists...)
	}
	if l.outcomes["ok"] == 0 {
		s.violated("no call succeeded: %v", l.outcomes)
	}
}

// quiet waits until the nodes are as they were before any device came.
func (s *storm) quiet() {
	for at, n := range s.Nodes {
		s.eventually(fmt.Sprintf("node-%d has no goroutines left over", at), func() string {
			if now := n.Metric(s.t, "go_goroutines"); now > s.baseline+15 {
				return fmt.Sprintf("%v goroutines, %v at the start", now, s.baseline)
			}
			return ""
		})
	}
	s.eventually("no device is online", func() string {
		if online := s.DB.Count(s.t, "SELECT count(*) FROM presence WHERE online"); online != 0 {
			return fmt.Sprintf("%d rows say online", online)
		}
		return ""
	})
}

func (s *storm) eventually(what string, wrong func() string) {
	s.t.Helper()
	last := ""
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if last = wrong(); last == "" {
			return
		}
	}
	s.violated("not within 30 s: %s: %s", what, last)
}
