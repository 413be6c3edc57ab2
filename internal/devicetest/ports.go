// Package devicetest holds what tests of the core and of its front ends share:
// ports that record instead of acting, a device made of a script, and the
// suite of behaviours every front end must show. Production never imports it.
package devicetest

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/audit"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/devices/registry/registrytest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
)

// Admin is the fleet's administrator.
var Admin = access.Principal{Caller: access.Admin, Via: access.ViaREST, From: "127.0.0.1:1"}

// AllowURLs lets every tool have addresses under the prefix.
func AllowURLs(t testing.TB, s *fleet.Service, prefix string) {
	t.Helper()
	SetPolicy(t, s, access.Policy{URLs: []access.URLRule{{Tools: []string{"*"}, Prefixes: []string{prefix}}}})
}

// SetPolicy brings a policy into force.
func SetPolicy(t testing.TB, s *fleet.Service, p access.Policy) {
	t.Helper()
	if _, err := s.SetPolicy(t.Context(), Admin, p, s.Guard().Policy().Version); err != nil {
		t.Fatal(err)
	}
}

// Ports records everything the core sends out. It is safe for concurrent use;
// read and set its fields while nothing runs.
type Ports struct {
	Ledger *registrytest.Ledger // what is decided

	mu        sync.Mutex
	facts     map[devices.ID]devices.Facts
	lists     map[devices.Hash]*catalog.Catalog // Texts, parsed
	Presences map[devices.ID]devices.Presence
	Texts     map[devices.Hash]devices.CatalogText
	Entries   []devices.HistoryEntry
	Chips     map[string]devices.AttestationKey
	Events    []devices.Event
	Audio     []Audio
	Claims    []devices.Claim
	News      []devices.News
	Held      map[devices.ID]int
	Audited   []audit.Entry
	Full      bool          // tool lists find no room in the queue
	Asked     int           // questions to other nodes
	AskTime   time.Duration // how long each takes
	Expires   time.Duration

	away     bool
	rowTime  time.Duration // how long reading rows takes
	services []*fleet.Service
}

// New returns empty ports.
func New() *Ports {
	return &Ports{Ledger: registrytest.New(), facts: map[devices.ID]devices.Facts{}, lists: map[devices.Hash]*catalog.Catalog{},
		Presences: map[devices.ID]devices.Presence{},
		Texts:     map[devices.Hash]devices.CatalogText{}, Chips: map[string]devices.AttestationKey{}, Held: map[devices.ID]int{}, Expires: 24 * time.Hour}
}

// Service returns a core over these ports that has read its members, and is
// closed with the test.
func (p *Ports) Service(t testing.TB, cfg fleet.Config) *fleet.Service {
	t.Helper()
	return p.ServiceOver(t, cfg, nil)
}

// ServiceOver is Service with other ports in place of these where change puts
// them.
func (p *Ports) ServiceOver(t testing.TB, cfg fleet.Config, change func(*fleet.Ports)) *fleet.Service {
	t.Helper()
	s := p.new(t, cfg, change)
	if err := s.Registry().Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// Unread is Service for a core that could not read its members: the database is
// away, and there is no snapshot. Back brings the database back and has the core
// read them.
func (p *Ports) Unread(t testing.TB, cfg fleet.Config) *fleet.Service {
	t.Helper()
	p.SetAway(true)
	return p.Service(t, cfg)
}

// Back brings the database back, and has the core read what it missed.
func (p *Ports) Back(t testing.TB, s *fleet.Service) {
	t.Helper()
	p.SetAway(false)
	Refresh(t, s)
}

// Refresh has a core read what was decided since it read last.
func Refresh(t testing.TB, s *fleet.Service) {
	t.Helper()
	if err := s.Registry().Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// FleetPorts are these as the ports of a core.
func (p *Ports) FleetPorts() fleet.Ports {
	return fleet.Ports{Records: p, Catalogs: p, Ledger: &ledger{p.Ledger, p}, Codes: p.Ledger, Grants: p.Ledger, Publisher: p, Directory: p, Router: p, Vision: p, Audio: p, Audit: p, Log: slog.New(slog.DiscardHandler)}
}

func (p *Ports) new(t testing.TB, cfg fleet.Config, change func(*fleet.Ports)) *fleet.Service {
	t.Helper()
	if cfg.Node == "" {
		cfg.Node = "n-test"
	}
	cfg.CallsPerDevice, cfg.Handshakes = max(cfg.CallsPerDevice, 1), max(cfg.Handshakes, 8)
	ports := p.FleetPorts()
	if change != nil {
		change(&ports)
	}
	s := fleet.New(cfg, ports)
	p.mu.Lock()
	p.services = append(p.services, s)
	p.mu.Unlock()
	t.Cleanup(s.Close)
	return s
}

// SetAway makes the database fail, or work again.
func (p *Ports) SetAway(away bool) {
	p.Ledger.SetAway(away)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away = away
}

// SlowRows makes every reading of rows take so long.
func (p *Ports) SlowRows(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rowTime = d
}

// failure is why the database cannot be used.
func (p *Ports) failure() error {
	if p.away {
		return devices.ErrDatabase
	}
	return nil
}

// Publish implements fleet.Publisher.
func (p *Ports) Publish(e devices.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.Fields = slices.Clone(e.Fields)
	p.Events = append(p.Events, e)
}

// Hold implements fleet.Directory.
func (p *Ports) Hold(id devices.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Held[id]++
	return nil
}

// Release implements fleet.Directory.
func (p *Ports) Release(id devices.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Held[id]--
}

// Claim implements fleet.Directory.
func (p *Ports) Claim(c devices.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Claims = append(p.Claims, c)
}

// Remind implements fleet.Directory.
func (p *Ports) Remind(c devices.Claim) { p.Claim(c) }

// Claimed returns the claims made so far.
func (p *Ports) Claimed() []devices.Claim {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.Claims)
}

// PublishNews implements fleet.Directory.
func (p *Ports) PublishNews(n devices.News) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.News = append(p.News, n)
}

// Told returns the news sent so far.
func (p *Ports) Told() []devices.News {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.News)
}

// Forward implements fleet.Router: there is no other node.
func (p *Ports) Forward(context.Context, devices.ToolCall) (devices.ToolResult, error) {
	return devices.ToolResult{}, devices.ErrNoHolder
}

// ForwardRPC implements fleet.Router.
func (p *Ports) ForwardRPC(context.Context, devices.RPCCall) (devices.RPCResult, error) {
	return devices.RPCResult{}, devices.ErrNoHolder
}

// ForwardMessage implements fleet.Router.
func (p *Ports) ForwardMessage(context.Context, devices.Message) error { return devices.ErrNoHolder }

// Query fails like any Router without other nodes, after AskTime.
func (p *Ports) Query(ctx context.Context, _ devices.ID, _ devices.Query) ([]byte, error) {
	p.mu.Lock()
	p.Asked++
	takes := p.AskTime
	p.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
	}
	return nil, devices.ErrNoHolder
}

// SlowNodes sets AskTime, and returns how many questions there were.
func (p *Ports) SlowNodes(each time.Duration) (asked func() int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Asked, p.AskTime = 0, each
	return func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.Asked
	}
}

// Topic implements speech.AudioBus.
func (p *Ports) Topic(id devices.ID) string { return "audio." + id.Token() }

// PublishAudio implements speech.AudioBus and keeps the packets.
func (p *Ports) PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Audio = append(p.Audio, Audio{topic, session, seq, bytes.Clone(f.Opus)})
	return true
}

// Frames returns the frames of devices published so far, oldest first.
func (p *Ports) Frames() []Audio {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.Audio)
}

// Audio is one frame of a device.
type Audio struct {
	Topic, Session string
	Seq            uint64
	Opus           []byte
}

// Grant implements fleet.Vision.
func (p *Ports) Grant(id devices.ID, now time.Time) (url, token string, expires time.Time) {
	return "http://192.0.2.1:8000/xiaozhi/vision/explain", "token-of-" + id.Token(), now.Add(p.Expires)
}

// Snapshot implements fleet.Vision.
func (p *Ports) Snapshot(id devices.ID, _ time.Time) (url, photo string) {
	return "http://192.0.2.1:8000/xiaozhi/snapshot/" + id.Token(), "photo-of-" + id.Token()
}

// Seen returns the recorded events of one kind, oldest first.
func (p *Ports) Seen(kind devices.EventKind) []devices.Event {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []devices.Event
	for _, e := range p.Events {
		if e.Kind == kind {
			found = append(found, e)
		}
	}
	return found
}

// Of returns copies of what is recorded of one device.
func (p *Ports) Of(id devices.ID) (d devices.Device, n devices.Presence, history []devices.HistoryEntry, held int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.Entries {
		if e.Device == id {
			history = append(history, e)
		}
	}
	if m, known := p.Ledger.Member(id); known {
		d = p.rowLocked(m).Device
	}
	return d, p.Presences[id], history, p.Held[id]
}

// Eventually waits until done, and fails the test after 30 seconds. It looks after an eighth of what it has waited, 1 to 25 ms: what
// comes soon is seen soon, and what takes long does not lose the processor to who looks for it.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	const limit = 30 * time.Second // a machine that builds beside the tests may take 10 s for what takes milliseconds
	for begun := time.Now(); !done(); time.Sleep(min(max(time.Since(begun)/8, time.Millisecond), 25*time.Millisecond)) {
		if time.Since(begun) > limit {
			t.Fatalf("did not come true within %v: %s", limit, what)
		}
	}
}

// Record implements audit.Auditor.
func (p *Ports) Record(e audit.Entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Audited = append(p.Audited, e)
}

// Recorded are the entries so far.
func (p *Ports) Recorded() []audit.Entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.Audited)
}
