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
	"fleetd/internal/envelope"
)

// Admin asks as the fleet's administrator.
var Admin = access.By{Who: access.Admin, Via: access.ViaREST, From: "127.0.0.1:1"}

// AllowURLs lets every tool have addresses under the prefix.
func AllowURLs(t testing.TB, s *devices.Service, prefix string) {
	t.Helper()
	SetPolicy(t, s, access.Policy{URLs: []access.URLRule{{Tools: []string{"*"}, Prefixes: []string{prefix}}}})
}

// SetPolicy brings a policy into force.
func SetPolicy(t testing.TB, s *devices.Service, p access.Policy) {
	t.Helper()
	if _, err := s.SetPolicy(t.Context(), Admin, p, s.Guard().Policy().Version); err != nil {
		t.Fatal(err)
	}
}

// Ports records everything the core sends out. It is safe for concurrent use.
type Ports struct {
	mu         sync.Mutex
	Devices    map[devices.ID]devices.Device
	Presences  map[devices.ID]devices.Presence
	Texts      map[devices.Hash]devices.CatalogText
	Entries    []devices.HistoryEntry
	Exceptions []devices.Exception
	Chips      map[string]devices.AttestationKey
	Fleet      devices.Rotation
	Events     []devices.Event
	Audio      []Audio
	Claims     []devices.Claim
	Held       map[devices.ID]int
	Keys       map[string]access.Key
	Policy     access.Policy
	Audited    []audit.Entry
	Away       bool          // reads fail as if the database were down
	Full       bool          // tool lists find no room in the queue
	Asked      int           // questions to other nodes
	AskTime    time.Duration // how long each takes
	Expires    time.Duration
}

// New returns empty ports.
func New() *Ports {
	return &Ports{Devices: map[devices.ID]devices.Device{}, Presences: map[devices.ID]devices.Presence{},
		Texts: map[devices.Hash]devices.CatalogText{}, Keys: map[string]access.Key{}, Chips: map[string]devices.AttestationKey{}, Held: map[devices.ID]int{}, Expires: 24 * time.Hour}
}

// Service returns a core over these ports that has read its members, and is
// closed with the test.
func (p *Ports) Service(t testing.TB, cfg devices.Config) *devices.Service {
	t.Helper()
	s := p.Unread(t, cfg, nil)
	if err := s.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// Unread is Service for a core that has not read its members yet. change may
// put other ports in place of these.
func (p *Ports) Unread(t testing.TB, cfg devices.Config, change func(*devices.Ports)) *devices.Service {
	t.Helper()
	if cfg.Node == "" {
		cfg.Node = "n-test"
	}
	cfg.CallsPerDevice, cfg.Handshakes = max(cfg.CallsPerDevice, 1), max(cfg.Handshakes, 8)
	ports := devices.Ports{Records: p, Catalogs: p, Keeper: p, Warden: p, Rotations: p, Publisher: p, Directory: p, Router: p, Vision: p, Audio: p, Audit: p, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&ports)
	}
	s := devices.New(cfg, ports)
	t.Cleanup(s.Close)
	return s
}

// SetAway makes reads fail, or work again, as if the database were down.
func (p *Ports) SetAway(away bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Away = away
}

func (p *Ports) away() error {
	if p.Away {
		return devices.ErrDatabase
	}
	return nil
}

// Find implements devices.Records.
func (p *Ports) Find(_ context.Context, id devices.ID) (devices.Row, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.away(); err != nil {
		return devices.Row{}, err
	}
	d, ok := p.Devices[id]
	if !ok {
		return devices.Row{}, devices.ErrNotFound
	}
	return devices.Row{Device: d, Presence: p.Presences[id]}, nil
}

// List implements devices.Records; of the filters it knows the selector.
func (p *Ports) List(_ context.Context, q devices.Query) ([]devices.Row, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var rows []devices.Row
	for id, d := range p.Devices {
		if id > q.After && q.Selector.Matches(string(id), d.Labels) {
			rows = append(rows, devices.Row{Device: d, Presence: p.Presences[id]})
		}
	}
	slices.SortFunc(rows, func(a, b devices.Row) int {
		if a.Device.ID < b.Device.ID {
			return -1
		}
		return 1
	})
	return rows[:min(len(rows), q.Limit)], p.away()
}

// SaveDevice implements devices.Records.
func (p *Ports) SaveDevice(d devices.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if stored, ok := p.Devices[d.ID]; ok {
		d.KeepNewer(&stored)
	}
	p.Devices[d.ID] = d
}

// SavePresence implements devices.Records, fence included.
func (p *Ports) SavePresence(n devices.Presence) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.Presences[n.Device]
	if old.Epoch < n.Epoch || old.Epoch == n.Epoch && old.Seq < n.Seq {
		p.Presences[n.Device] = n
	}
}

// Catalog implements devices.Catalogs.
func (p *Ports) Catalog(_ context.Context, h devices.Hash) (devices.CatalogText, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text, ok := p.Texts[h]; ok {
		return text, p.away()
	}
	return devices.CatalogText{}, devices.ErrNotFound
}

// History implements devices.Catalogs.
func (p *Ports) History(_ context.Context, id devices.ID, _ devices.Epoch, _ int64, limit int) ([]devices.HistoryEntry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []devices.HistoryEntry
	for _, e := range slices.Backward(p.Entries) {
		if e.Device == id && len(found) < limit {
			found = append(found, e)
		}
	}
	return found, p.away()
}

// KeepCatalog implements devices.Catalogs.
func (p *Ports) KeepCatalog(text devices.CatalogText) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Texts[text.Hash] = text
}

// SaveCatalog implements devices.Catalogs and commits at once.
func (p *Ports) SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool) {
	p.mu.Lock()
	if p.Full {
		p.mu.Unlock()
		return false
	}
	p.Entries = append(p.Entries, e)
	p.Texts[text.Hash] = text
	p.mu.Unlock()
	committed()
	return true
}

// LoadDevices implements devices.Keeper.
func (p *Ports) LoadDevices(ctx context.Context, f func(devices.Row) error) error {
	rows, err := p.List(ctx, devices.Query{Limit: 1 << 30})
	for _, row := range rows {
		if err := f(row); err != nil {
			return err
		}
	}
	return err
}

// LoadExceptions implements devices.Keeper.
func (p *Ports) LoadExceptions(context.Context) ([]devices.Exception, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.Exceptions), p.away()
}

// SaveException implements devices.Keeper.
func (p *Ports) SaveException(e devices.Exception) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Exceptions = append(p.Exceptions, e)
}

// Written implements devices.Keeper.
func (p *Ports) Written(context.Context, devices.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.away()
}

// Forget implements devices.Keeper.
func (p *Ports) Forget(_ context.Context, id devices.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.Devices, id)
	delete(p.Presences, id)
	return p.away()
}

// Publish implements devices.Publisher.
func (p *Ports) Publish(e devices.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.Fields = slices.Clone(e.Fields)
	p.Events = append(p.Events, e)
}

// Hold implements devices.Directory.
func (p *Ports) Hold(id devices.ID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Held[id]++
	return nil
}

// Release implements devices.Directory.
func (p *Ports) Release(id devices.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Held[id]--
}

// Claim implements devices.Directory.
func (p *Ports) Claim(c devices.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Claims = append(p.Claims, c)
}

// Claimed returns the claims made so far.
func (p *Ports) Claimed() []devices.Claim {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.Claims)
}

// Tell implements devices.Directory.
func (p *Ports) Tell(devices.News) {}

// Forward implements devices.Router: there is no other node.
func (p *Ports) Forward(context.Context, devices.ToolCall) (devices.ToolResult, error) {
	return devices.ToolResult{}, devices.ErrNoHolder
}

// ForwardRPC implements devices.Router.
func (p *Ports) ForwardRPC(context.Context, devices.RPCCall) (devices.RPCResult, error) {
	return devices.RPCResult{}, devices.ErrNoHolder
}

// ForwardMessage implements devices.Router.
func (p *Ports) ForwardMessage(context.Context, devices.Message) error { return devices.ErrNoHolder }

// Ask fails like any Router without other nodes, after AskTime.
func (p *Ports) Ask(ctx context.Context, _ devices.ID, _ devices.Question) ([]byte, error) {
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

// Topic implements devices.AudioBus.
func (p *Ports) Topic(id devices.ID) string { return "audio." + id.Token() }

// PublishAudio implements devices.AudioBus and keeps the packets.
func (p *Ports) PublishAudio(topic, session string, seq uint64, f envelope.Frame) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Audio = append(p.Audio, Audio{topic, session, seq, bytes.Clone(f.Opus)})
	return true
}

// Heard returns the frames of devices published so far, oldest first.
func (p *Ports) Heard() []Audio {
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

// Grant implements devices.Vision.
func (p *Ports) Grant(id devices.ID, now time.Time) (url, token string, expires time.Time) {
	return "http://192.0.2.1:8000/xiaozhi/vision/explain", "token-of-" + id.Token(), now.Add(p.Expires)
}

// Snapshot implements devices.Vision.
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
	return p.Devices[id], p.Presences[id], history, p.Held[id]
}

// Eventually waits until done, looking every few milliseconds, and fails the
// test after ten seconds.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(10 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-deadline.C:
			t.Fatalf("did not come true within 10 s: %s", what)
		case <-tick.C:
		}
	}
}

// LoadKeys implements devices.Warden.
func (p *Ports) LoadKeys(context.Context) (keys []access.Key, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.Keys {
		keys = append(keys, k)
	}
	return keys, p.away()
}

// SaveKey implements devices.Warden.
func (p *Ports) SaveKey(_ context.Context, k access.Key) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.away(); err != nil {
		return err
	}
	p.Keys[k.ID] = k
	return nil
}

// LoadPolicy implements devices.Warden.
func (p *Ports) LoadPolicy(context.Context) (access.Policy, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Policy, p.away()
}

// SavePolicy implements devices.Warden.
func (p *Ports) SavePolicy(_ context.Context, policy access.Policy) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.away(); err != nil {
		return err
	}
	if policy.Version <= p.Policy.Version {
		return devices.ErrConflict
	}
	p.Policy = policy
	return nil
}

// Record implements devices.Auditor.
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
