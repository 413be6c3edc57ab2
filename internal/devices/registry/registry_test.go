package registry_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devices/registry/registrytest"
	"fleetd/internal/devicetest"
)

// watcher is an Observer that records its notifications.
type watcher struct {
	mu       sync.Mutex
	changes  []devices.Change
	replaced int
	revoked  []registry.Revocation
	rows     []devices.Row
}

func (w *watcher) note(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}
func (w *watcher) OnChange(c devices.Change)   { w.note(func() { w.changes = append(w.changes, c) }) }
func (w *watcher) OnReplace(registry.Snapshot) { w.note(func() { w.replaced++ }) }
func (w *watcher) OnRevocation(p registry.Revocation) {
	w.note(func() { w.revoked = append(w.revoked, p) })
}
func (w *watcher) OnRow(row devices.Row) { w.note(func() { w.rows = append(w.rows, row) }) }

// node is a Registry under test.
type node struct {
	*registry.Registry
	watcher *watcher
	dir     string
}

func startNode(t *testing.T, l *registrytest.Ledger, dir string, change ...func(*registry.Options)) *node {
	t.Helper()
	n := &node{watcher: &watcher{}, dir: dir}
	opt := registry.Options{Ledger: l, Records: l, Observer: n.watcher, Node: "n", Dir: dir, Fleet: "fleet", Log: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&opt)
	}
	opt.OnRotation = func(devices.Rotation, bool) {}
	n.Registry = registry.New(opt)
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

func join(t *testing.T, n *node, id devices.ID, client string) {
	t.Helper()
	err := n.Join(t.Context(), id, client, devices.TransportMQTT)
	for range 10 { // on a slow machine a join may take longer than JoinLimit; devices retry, too
		if err == nil || devices.AsError(err).Code != devices.CodeUnavailable {
			break
		}
		err = n.Join(t.Context(), id, client, devices.TransportMQTT)
	}
	if err != nil {
		t.Fatalf("join of %s: %v", id, err)
	}
}

func TestJoinAndRevoke(t *testing.T) {
	l := registrytest.New()
	n := startNode(t, l, t.TempDir())
	join(t, n, "aa:00:00:00:00:01", "client")
	if s := n.Status("aa:00:00:00:00:01", "client"); !s.Member() || s.Client != registry.ClientSame {
		t.Fatalf("after the join: %+v", s)
	}
	if s := n.Status("aa:00:00:00:00:01", "other"); s.Client != registry.ClientOther {
		t.Fatalf("another client: %+v", s)
	}
	got, err := n.Revoke(t.Context(), "admin", "aa:00:00:00:00:01")
	if err != nil || !got.Recorded {
		t.Fatalf("revoke: %+v, %v", got, err)
	}
	if s := n.Status("aa:00:00:00:00:01", "client"); s.Member() {
		t.Fatalf("after the revocation: %+v", s)
	}
	if x := n.Generations("aa:00:00:00:00:01"); !x.Revoked || x.Generation != 1 {
		t.Fatalf("after the revocation: %+v", x)
	}
	if _, err := n.Approve(t.Context(), "admin", "aa:00:00:00:00:01", "client", nil); err != nil {
		t.Fatal(err)
	}
	if x := n.Generations("aa:00:00:00:00:01"); x.Revoked || x.Generation != 1 {
		t.Fatalf("after the approval: %+v", x)
	}
	if err := n.ForgetAt(t.Context(), "admin", "aa:00:00:00:00:01", 0); err != nil {
		t.Fatal(err)
	}
	if x := n.Generations("aa:00:00:00:00:01"); x.Generation != 2 || n.Members() != 0 {
		t.Fatalf("after it was forgotten: %+v, %d members", x, n.Members())
	}
}

// A revoked, forgotten or rotated device gets a generation above the fleet's rotation,
// whether or not the node has received that rotation.
func TestRotationByAnotherNode(t *testing.T) {
	for name, end := range map[string]func(n *node) error{
		"revoked":   func(n *node) error { _, err := n.Revoke(t.Context(), "admin", "a"); return err },
		"forgotten": func(n *node) error { return n.ForgetAt(t.Context(), "admin", "a", 0) },
		"rotated":   func(n *node) error { return n.Rotate(t.Context(), "admin", "a", time.Now().Add(time.Hour), 0) },
		"replaced":  func(n *node) error { _, err := n.Approve(t.Context(), "admin", "a", "other", nil); return err },
	} {
		t.Run(name, func(t *testing.T) {
			l := registrytest.New()
			n := startNode(t, l, "")
			join(t, n, "a", "client")
			l.SetRotation(devices.Rotation{Generation: 5})
			if err := end(n); err != nil || n.Generations("a").Generation != 6 {
				t.Errorf("%+v, %v", n.Generations("a"), err)
			}
		})
	}
}

// A device that joins while the database is slow is refused, and is a member as soon as
// its join is committed, without any other decision.
func TestLateJoin(t *testing.T) {
	for _, commits := range []func(l *registrytest.Ledger){
		func(l *registrytest.Ledger) { l.SetDelay(2 * registry.JoinLimit) }, // while the join still waits
		func(l *registrytest.Ledger) { l.SetLate(time.Minute) },             // when the join no longer waits
	} {
		synctest.Test(t, func(t *testing.T) {
			l := registrytest.New()
			n := startNode(t, l, "")
			commits(l)
			begun := time.Now()
			if err := n.Join(t.Context(), "aa:00:00:00:00:01", "client", devices.TransportMQTT); !hasCode(err, devices.CodeUnavailable) {
				t.Errorf("while the database is slow: %v", err)
			}
			if waited := time.Since(begun); waited != registry.JoinLimit {
				t.Errorf("the join waited for %v", waited)
			}
			time.Sleep(time.Minute) // fake time
			if s := n.Status("aa:00:00:00:00:01", "client"); !s.Member() || s.Client != registry.ClientSame {
				t.Errorf("after the commit: %+v", s)
			}
		})
	}
}

// slowLog is a ledger whose log does not answer, or whose head is reported late.
type slowLog struct {
	*registrytest.Ledger
	stuck  atomic.Bool
	onHead func() // called between the read of the head and its return
}

func (l *slowLog) Changes(ctx context.Context, from int64, limit int) ([]devices.Change, error) {
	if l.stuck.Load() {
		<-ctx.Done()
		return nil, fmt.Errorf("%w: %w", devices.ErrDatabase, ctx.Err())
	}
	return l.Ledger.Changes(ctx, from, limit)
}

func (l *slowLog) Head(ctx context.Context) (devices.Position, error) {
	at, err := l.Ledger.Head(ctx)
	if f := l.onHead; f != nil {
		l.onHead = nil
		f()
	}
	return at, err
}

// A join that is recorded but not in force here in time is refused as unavailable: the
// device is not pending approval.
func TestJoinAfterAGap(t *testing.T) {
	l := registrytest.New()
	slow := &slowLog{Ledger: l}
	other, n := startNode(t, l, ""), startNode(t, l, "", func(o *registry.Options) { o.Ledger = slow })
	slow.stuck.Store(true)
	join(t, other, "aa:00:00:00:00:01", "client")
	if err := n.Join(t.Context(), "aa:00:00:00:00:02", "client", devices.TransportMQTT); !hasCode(err, devices.CodeUnavailable) {
		t.Errorf("with a missing change before it: %v", err)
	}
}

// A commit during the read of the head is not a history that went backwards.
func TestDecisionWhileRefreshing(t *testing.T) {
	l := registrytest.New()
	slow := &slowLog{Ledger: l}
	n := startNode(t, l, "", func(o *registry.Options) { o.Ledger = slow })
	join(t, n, "aa:00:00:00:00:01", "client")
	slow.onHead = func() { join(t, n, "aa:00:00:00:00:02", "client") }
	if err := n.Refresh(t.Context()); err != nil || n.Stats.Restored.Load() != 0 || n.Position().Revision != 2 {
		t.Errorf("%v, the history went backwards %d times, at %+v", err, n.Stats.Restored.Load(), n.Position())
	}
}

// The history loses its end under the same lineage, as when a standby takes over. A later
// decision is in force when it returns, and a node that receives it drops the lost
// changes, even if revisions have advanced since.
func TestDecisionAfterALostTail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := registrytest.New()
		n, other := startNode(t, l, ""), startNode(t, l, "")
		at := n.Position()
		for i, id := range []devices.ID{"aa:00:00:00:00:01", "aa:00:00:00:00:02", "aa:00:00:00:00:03"} {
			join(t, n, id, "client")
			if at = n.Position(); at.Revision != int64(i+1) {
				t.Fatalf("%+v", at)
			}
		}
		if err := other.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		l.RestoreTo(2, at.Lineage)
		if _, err := n.Revoke(t.Context(), "admin", "aa:00:00:00:00:01"); err != nil {
			t.Fatal(err)
		}
		if n.Status("aa:00:00:00:00:01", "client").Member() || n.Status("aa:00:00:00:00:03", "client").Known {
			t.Errorf("after the revocation: %+v, %+v", n.Status("aa:00:00:00:00:01", "client"), n.Status("aa:00:00:00:00:03", "client"))
		}
		other.Offer(l.Log(2)) // includes the change that would follow the lost ones
		time.Sleep(time.Second)
		synctest.Wait()
		if other.Status("aa:00:00:00:00:01", "client").Member() || other.Status("aa:00:00:00:00:03", "client").Known || other.Position() != n.Position() {
			t.Errorf("another node: %+v at %+v", other.Status("aa:00:00:00:00:03", "client"), other.Position())
		}
	})
}

// hasCode reports whether an error has this code.
func hasCode(err error, code devices.Code) bool {
	return err != nil && devices.AsError(err).Code == code
}

// TestFold makes random decisions on three nodes whose hints are lost, late, duplicated
// and out of order: all end with the state in the tables.
func TestFold(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() {
		seeds = 5
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) { fold(t, seed) }) // in fake time, without waiting for gaps
	}
}

func fold(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	l := registrytest.New()
	var nodes []*node
	for i := range 3 {
		nodes = append(nodes, startNode(t, l, "", func(o *registry.Options) { o.Node = fmt.Sprint(i) }))
	}
	var hints []devices.Change
	for range 200 {
		n := nodes[r.IntN(3)]
		id := devices.ID(fmt.Sprintf("d%d", r.IntN(8)))
		d := randomDecision(r, id)
		out, err := n.Decide(t.Context(), []devices.Decision{d})
		if err != nil {
			t.Fatal(err)
		}
		hints = append(hints, out[0].Changes...)
		for range r.IntN(4) { // some hints, of any time, in any order, possibly repeated
			if len(hints) > 0 {
				nodes[r.IntN(3)].Offer([]devices.Change{hints[r.IntN(len(hints))]})
			}
		}
	}
	for _, n := range nodes {
		if err := n.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		checkAgainst(t, n, l)
		n.Close() // inside the bubble
	}
	if t.Failed() {
		t.Fatalf("seed %d", seed)
	}
}

func randomDecision(r *rand.Rand, id devices.ID) devices.Decision {
	client := fmt.Sprint("client", r.IntN(3))
	d := devices.Decision{Device: id, Who: "test", Import: r.IntN(4) == 0}
	what := r.IntN(10)
	d.Decide = func(m *devices.Member) error {
		if !m.Known() && what != 0 && what != 6 && what != 8 {
			return registry.UnknownDevice(id)
		}
		switch what {
		case 0:
			if !m.Known() {
				m.Admission, m.ClientID, m.JoinTransport = devices.AdmissionMember, client, devices.TransportMQTT
				if d.Import {
					m.JoinTransport = devices.TransportNone
				}
			}
		case 1:
			m.Name = client
		case 2:
			m.Labels = map[string]string{"room": client, client: "x"}
		case 3:
			m.Admission = devices.AdmissionRevoked
			registry.RaiseGeneration(m, devices.Rotation{}, "revoked")
		case 4:
			m.Prefer = devices.TransportWebSocket
		case 5:
			m.Admission, m.ClientID = devices.AdmissionMember, client
			registry.RaiseGeneration(m, devices.Rotation{}, "approved")
		case 6:
			if m.Known() && !d.Import {
				m.Admission = devices.AdmissionForgotten
				registry.RaiseGeneration(m, devices.Rotation{}, registry.ReasonForgotten)
			}
		case 7:
			m.Previous, m.PreviousUntil = m.Generation, time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
			m.Generation++
		case 8:
			m.Refused = m.Refused.With(client)
		case 9:
			m.Admit(client)
		}
		return nil
	}
	return d
}

// checkAgainst compares a node's state with the ledger's tables.
func checkAgainst(t *testing.T, n *node, l *registrytest.Ledger) {
	t.Helper()
	members := 0
	for id, m := range l.Members() {
		s := n.Status(id, m.ClientID)
		want := registry.Status{Known: m.Known(), Revoked: m.Admission == devices.AdmissionRevoked, Prefer: m.Prefer, Client: registry.ClientSame}
		if other := n.Status(id, "some client"); m.ClientID == "" && other.Client != registry.ClientNone {
			t.Errorf("%s has status %+v for the first client", id, other)
		}
		if s != want {
			t.Errorf("%s has status %+v, want %+v", id, s, want)
		}
		x, _ := m.Exception()
		if got, want := n.Generations(id), devices.GenerationsOf(x); got.Generation != want.Generation || got.Revoked != want.Revoked || got.Previous != want.Previous || got.PreviousUntil != want.PreviousUntil {
			t.Errorf("%s has %+v, want %+v", id, got, want)
		}
		if n.Refused(id) != m.Refused {
			t.Errorf("%s refuses %s, want %s", id, n.Refused(id), m.Refused)
		}
		if m.Known() {
			members++
			if got, err := n.Member(t.Context(), id); err != nil || got.Name != m.Name || fmt.Sprint(got.Labels) != fmt.Sprint(m.Labels) {
				t.Errorf("member %s is %+v (%v), want %+v", id, got, err, m)
			}
		}
	}
	if n.Members() != members {
		t.Errorf("%d members, want %d", n.Members(), members)
	}
}

func TestRestart(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "aa:00:00:00:00:01", "client")
	join(t, n, "aa:00:00:00:00:02", "client")
	if _, err := n.Revoke(t.Context(), "admin", "aa:00:00:00:00:02"); err != nil {
		t.Fatal(err)
	}
	key := access.Key{ID: "k1", Name: "key"}
	if err := n.SaveKey(t.Context(), "admin", key); err != nil {
		t.Fatal(err)
	}
	n.Close()
	l.SetAway(true)
	again := startNode(t, l, dir)
	if !again.Ready() || !again.Status("aa:00:00:00:00:01", "client").Member() || again.Status("aa:00:00:00:00:02", "client").Member() {
		t.Fatalf("after a start without the database: ready %v, %+v, %+v", again.Ready(), again.Status("aa:00:00:00:00:01", "client"), again.Status("aa:00:00:00:00:02", "client"))
	}
	if len(again.HeldKeys()) != 1 {
		t.Fatalf("keys: %v", again.HeldKeys())
	}
	if err := again.Join(t.Context(), "aa:00:00:00:00:03", "client", devices.TransportMQTT); !hasCode(err, devices.CodeUnavailable) {
		t.Fatalf("an unknown device while the database is unreachable: %v", err)
	}
}

func TestClientKey(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "a", "client")
	client := n.Client("client")
	if len(client) != 12 || client == n.Client("other") || n.Client("") != "" {
		t.Fatalf("clients %q, %q, %q", client, n.Client("other"), n.Client(""))
	}
	n.Close()
	l.SetAway(true)
	n = startNode(t, l, dir)
	// security: D20
	if got := n.Client("client"); got != client {
		t.Errorf("without the database: %q, want %q", got, client)
	}
}

// A node that starts from the snapshot of an older version reads the registry again: the older one ignored changes of aspects that it
// did not know.
func TestSnapshotOfAnOlderVersion(t *testing.T) {
	all := devices.Aspects
	t.Cleanup(func() { devices.Aspects = all })
	for _, knew := range [][]devices.Aspect{all[1:], all} {
		l, dir := registrytest.New(), t.TempDir()
		devices.Aspects = knew
		n := startNode(t, l, dir)
		join(t, n, "a", "client")
		n.Close()
		devices.Aspects = all
		n = startNode(t, l, dir)
		if got, want := n.Stats.Snapshots.Load(), uint64(len(all)-len(knew)); got != want || !n.Status("a", "client").Member() {
			t.Errorf("the writer knew %d of %d aspects: the registry was read %d times, want %d", len(knew), len(all), got, want)
		}
		n.Close() // it writes a snapshot by itself
	}
}

// A key of the console leaves the snapshot some time after its end.
func TestConsoleKeysLeaveTheSnapshot(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	parent, now := access.Parent{Key: "p"}, time.Now()
	for _, k := range []access.Key{
		{ID: "over", Parent: parent, Expires: now.Add(-access.KeepConsoleKeys - time.Hour)},
		{ID: "ended", Parent: parent, Expires: now.Add(-time.Hour)},
		{ID: "key", Expires: now.Add(-2 * access.KeepConsoleKeys)},
	} {
		if err := n.SaveKey(t.Context(), "admin", k); err != nil {
			t.Fatal(err)
		}
	}
	n.Close()
	l.SetAway(true)
	if keys := slices.Sorted(maps.Keys(startNode(t, l, dir).HeldKeys())); !slices.Equal(keys, []string{"ended", "key"}) {
		t.Errorf("keys: %v", keys)
	}
}

// TestSnapshotDamage truncates and damages the snapshot everywhere: a node then starts
// without one, and refuses all devices while the database is unreachable.
func TestSnapshotDamage(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	for i := range 1000 {
		join(t, n, devices.ID(fmt.Sprintf("device-%d", i)), "client")
	}
	n.RenewFile() // one snapshot with all of them
	n.Close()
	l.SetAway(true)
	path := filepath.Join(dir, registry.SnapshotFile)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, content []byte, usable bool) {
		t.Helper()
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		again := startNode(t, l, dir)
		defer again.Close()
		if again.Ready() != usable {
			t.Errorf("%s: ready is %v", what, again.Ready())
		}
		if err := again.CheckReady(); (err == nil) != usable {
			t.Errorf("%s: CheckReady returns %v", what, err)
		}
	}
	check("whole", whole, true)
	for at := 0; at < len(whole); at += 4096 {
		check(fmt.Sprintf("cut at %d", at), whole[:at], false)
	}
	check("cut by one", whole[:len(whole)-1], false)
	check("one byte more", append(slices.Clone(whole), 0), false)
	for range 100 {
		at := rand.IntN(8 * len(whole))
		flipped := slices.Clone(whole)
		flipped[at/8] ^= 1 << (at % 8)
		check(fmt.Sprintf("bit %d flipped", at), flipped, false)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	other := startNode(t, l, dir, func(o *registry.Options) { o.Fleet = "another" })
	if other.Ready() {
		t.Error("the snapshot of another fleet is used")
	}
}

// TestTornTail truncates the changes file anywhere: complete lines are used.
func TestTornTail(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "first", "client")
	devicetest.Eventually(t, "the snapshot is written with the first change", func() bool {
		_, err := os.Stat(filepath.Join(dir, registry.TailFile))
		return err == nil
	})
	for i := range 20 {
		join(t, n, devices.ID(fmt.Sprintf("device-%d", i)), "client")
	}
	n.Close()
	l.SetAway(true)
	path := filepath.Join(dir, registry.TailFile)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before := 0
	for at := 0; at <= len(whole); at += 37 {
		if err := os.WriteFile(path, whole[:at], 0o600); err != nil {
			t.Fatal(err)
		}
		again := startNode(t, l, dir)
		if !again.Ready() || again.Members() < before {
			t.Fatalf("cut at %d: ready %v, %d members after %d", at, again.Ready(), again.Members(), before)
		}
		before = again.Members()
		again.Close()
	}
	if before < 15 {
		t.Errorf("%d members of a nearly complete tail", before)
	}
	damaged := bytes.Replace(whole, []byte("device-7"), []byte("device-x"), 1)
	if err := os.WriteFile(path, damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	if again := startNode(t, l, dir); again.Status("device-x", "client").Known {
		t.Error("a damaged line is applied")
	}
}

// TestSnapshotDuringChanges writes snapshots while changes arrive: none is lost, nor a
// change after one that is in both the snapshot and the queue.
func TestSnapshotDuringChanges(t *testing.T) {
	const count = 2000
	for range 3 {
		l, dir := registrytest.New(), t.TempDir()
		n := startNode(t, l, dir)
		for i := range count {
			if i%10 == 0 && i < count*9/10 {
				n.RenewFile()
			}
			id := devices.ID(fmt.Sprintf("device-%d", i))
			outcomes, err := l.Decide(t.Context(), []devices.Decision{{ID: string(id), Device: id, Decide: func(m *devices.Member) error {
				m.Admission = devices.AdmissionMember
				return nil
			}}})
			if err != nil {
				t.Fatal(err)
			}
			n.Offer(outcomes[0].Changes) // without waiting for the disk
		}
		n.Close()
		l.SetAway(true)
		again := startNode(t, l, dir)
		if again.Position() != n.Position() || again.Members() != count {
			t.Fatalf("after a start from the files: %d members at %+v, not %d at %+v", again.Members(), again.Position(), count, n.Position())
		}
	}
}

func TestHistoryGoesBackwards(t *testing.T) {
	for name, lineage := range map[string]string{"restored by fleetd": "second", "an outdated standby": "first"} {
		t.Run(name, func(t *testing.T) {
			l := registrytest.New()
			n := startNode(t, l, t.TempDir())
			join(t, n, "a", "client")
			join(t, n, "b", "client")
			l.RestoreTo(1, lineage)
			other := startNode(t, l, t.TempDir())
			join(t, other, "c", "client")
			join(t, other, "d", "client")
			if err := n.Refresh(t.Context()); err != nil {
				t.Fatal(err)
			}
			checkAgainst(t, n, l)
			if n.Stats.Restored.Load() != 1 {
				t.Errorf("restored %d times", n.Stats.Restored.Load())
			}
			if n.Status("b", "client").Known {
				t.Error("a device of the history that was lost is known")
			}
		})
	}
}

// A node that starts from its snapshot knows only the last change of the lost history, by its id.
func TestHistoryGoesBackwardsDuringARestart(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "a", "client")
	join(t, n, "b", "client")
	n.RenewFile() // the changes after a snapshot would contradict the other history, too
	n.Close()
	l.RestoreTo(1, "first")
	other := startNode(t, l, t.TempDir())
	join(t, other, "c", "client")
	join(t, other, "d", "client")
	again := startNode(t, l, dir)
	if err := again.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkAgainst(t, again, l)
	if again.Status("b", "client").Known {
		t.Error("a device of the history that was lost is known")
	}
}

func TestPruned(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "a", "client")
	n.Close()
	other := startNode(t, l, t.TempDir())
	for i := range 10 {
		join(t, other, devices.ID(fmt.Sprint("x", i)), "client")
	}
	l.Prune(5)
	again := startNode(t, l, dir)
	checkAgainst(t, again, l)
}

// A node that missed many changes reads the log, however many hints of later changes it has
// received.
func TestHintsFarAhead(t *testing.T) {
	l := registrytest.New()
	n := startNode(t, l, "")
	join(t, n, "a", "client")
	var all []devices.Change
	for i := range 25_000 {
		out, err := l.Decide(t.Context(), []devices.Decision{{ID: fmt.Sprint("far-", i), Device: "a", Who: "test", Decide: func(m *devices.Member) error { m.Name = fmt.Sprint(i); return nil }}})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, out[0].Changes...)
	}
	n.Offer(all[12_000:])
	devicetest.Eventually(t, "the node has read the missing changes", func() bool { return n.Position().Revision == all[len(all)-1].Revision })
	if err := n.Refresh(t.Context()); err != nil {
		t.Error(err)
	}
	checkAgainst(t, n, l)
}

// While the database is unreachable, a node with a snapshot that other nodes cannot
// complete admits no device.
func TestSnapshotTooOldForPeers(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	old := startNode(t, l, dir)
	join(t, old, "a", "client")
	old.Close()
	maker := startNode(t, l, t.TempDir())
	if _, err := maker.Revoke(t.Context(), "admin", "a"); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		join(t, maker, devices.ID(fmt.Sprint("x", i)), "client")
	}
	live := startNode(t, l, t.TempDir()) // read from the tables: it has none of the changes
	l.SetAway(true)
	again := startNode(t, l, dir, func(o *registry.Options) { o.Peers = pairPeers{func() *registry.Registry { return live.Registry }} })
	if again.Ready() || again.CheckReady() == nil {
		t.Error("it admits devices based on an outdated snapshot")
	}
	l.SetAway(false)
	if err := again.Refresh(t.Context()); err != nil || !again.Ready() || again.Status("a", "client").Member() {
		t.Errorf("with the database: %v, ready %v", err, again.Ready())
	}
}

// TestRevokeWithoutDatabase checks that a revocation is in force at once, is on disk, is
// written when the database is back, and that an approval has to wait for that.
func TestRevokeWithoutDatabase(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	n := startNode(t, l, dir)
	join(t, n, "a", "client")
	l.SetAway(true)
	got, err := n.Revoke(t.Context(), "admin", "a")
	if err != nil || got.Recorded || !slices.Equal(got.Nodes, []string{"n"}) {
		t.Fatalf("revoke: %+v, %v", got, err)
	}
	if n.Status("a", "client").Member() || !n.Generations("a").Revoked || len(n.watcher.revoked) != 1 {
		t.Fatal("the revocation is not in force")
	}
	n.Close()
	again := startNode(t, l, dir)
	if again.Status("a", "client").Member() {
		t.Fatal("the revocation is lost with the process")
	}
	if _, err := again.Approve(t.Context(), "admin", "a", "client", nil); !hasCode(err, devices.CodeUnavailable) || !strings.Contains(err.Error(), "revocation") {
		t.Fatalf("approve: %v", err)
	}
	l.SetAway(false)
	if err := again.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "no revocation is pending", func() bool { return len(again.PendingRevocations()) == 0 })
	if x := again.Generations("a"); !x.Revoked || x.Generation != 1 {
		t.Fatalf("after the database is back: %+v", x)
	}
	devicetest.Eventually(t, "the file of pending revocations is removed", func() bool {
		_, err := os.Stat(filepath.Join(dir, registry.RevocationsFile))
		return errors.Is(err, os.ErrNotExist)
	})
}

// pairPeers are two nodes that reach each other.
type pairPeers struct {
	other func() *registry.Registry
}

func (p pairPeers) Publish([]devices.Change) {} // all hints are lost
func (p pairPeers) Revoke(_ context.Context, r registry.Revocation) []string {
	if p.other().AddRevocation(r) != nil {
		return nil
	}
	return []string{"other"}
}
func (p pairPeers) Query(_ context.Context, at devices.Position) []registry.PeerAnswer {
	return []registry.PeerAnswer{p.other().Answer(at)}
}

// TestStartFromPeers checks that a node with an old snapshot gets later decisions from a
// live node before it admits devices.
func TestStartFromPeers(t *testing.T) {
	l, dir := registrytest.New(), t.TempDir()
	old := startNode(t, l, dir)
	join(t, old, "a", "client")
	join(t, old, "b", "client")
	old.Close()
	live := startNode(t, l, t.TempDir())
	if _, err := live.Revoke(t.Context(), "admin", "a"); err != nil {
		t.Fatal(err)
	}
	l.SetAway(true)
	if _, err := live.Revoke(t.Context(), "admin", "b"); err != nil {
		t.Fatal(err)
	}
	again := startNode(t, l, dir, func(o *registry.Options) { o.Peers = pairPeers{func() *registry.Registry { return live.Registry }} })
	for _, id := range []devices.ID{"a", "b"} {
		if !again.Ready() || again.Status(id, "client").Member() {
			t.Errorf("%s is admitted after its revocation; ready %v", id, again.Ready())
		}
	}
}

func TestIfMatch(t *testing.T) {
	l := registrytest.New()
	n := startNode(t, l, "")
	join(t, n, "a", "client")
	rename := func(m *devices.Member) error { m.Name = "lamp"; return nil }
	changes, err := n.Edit(t.Context(), "admin", "a", n.Position().Revision, rename)
	if err != nil || len(changes) != 1 {
		t.Fatal(changes, err)
	}
	if _, err := n.Edit(t.Context(), "admin", "a", changes[0].Revision-1, rename); !hasCode(err, devices.CodeStale) {
		t.Fatalf("an edit of an old revision: %v", err)
	}
}

// A write that may have been committed is not reported as failed.
func TestUncertainDecision(t *testing.T) {
	l := registrytest.New()
	n := startNode(t, l, "", func(o *registry.Options) { o.Ledger = uncertain{l} })
	_, err := n.Edit(t.Context(), "admin", "a", 0, func(*devices.Member) error { return nil })
	if !hasCode(err, devices.CodeUnavailable) || !strings.Contains(devices.AsError(err).Detail, "check whether") {
		t.Errorf("%v", err)
	}
}

// uncertain is a ledger whose commits fail with a lost connection.
type uncertain struct{ *registrytest.Ledger }

func (uncertain) Decide(context.Context, []devices.Decision) ([]devices.Outcome, error) {
	return nil, fmt.Errorf("%w: %w", devices.ErrUncertain, devices.ErrDatabase)
}

// changingHead is a ledger that makes another decision between the read of the head and
// its return.
type changingHead struct {
	registry.Ledger
	between func()
}

func (l *changingHead) Head(ctx context.Context) (devices.Position, error) {
	head, err := l.Ledger.Head(ctx)
	if between := l.between; between != nil {
		l.between = nil
		between()
	}
	return head, err
}

func TestOutdatedHeadIsNotARestore(t *testing.T) {
	l := registrytest.New()
	over := &changingHead{Ledger: l}
	n := startNode(t, l, t.TempDir(), func(opt *registry.Options) { opt.Ledger = over })
	join(t, n, "aa:00:00:00:00:01", "client")
	before := n.Stats.Restored.Load()
	over.between = func() { join(t, n, "aa:00:00:00:00:02", "client") }
	if err := n.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n.Stats.Restored.Load() != before {
		t.Error("a decision made while the head was read was taken for a restore")
	}
}
