package storetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/store"
	"fleetd/internal/store/database"
	"fleetd/internal/store/ledger"
)

// RunLedger runs the suite of package ledger.
func RunLedger(t *testing.T, makeDatabase Maker) {
	for _, test := range []struct {
		name string
		run  func(t *testing.T, db Database)
	}{
		{"two aspects edited at once both hold", testTwoAspects},
		{"a follower misses nothing of a slow transaction", testSlowTransaction},
		{"the fold of changes equals the tables", testFold},
		{"four ledgers do not deadlock", testLedgers},
		{"come and gone in one transaction, while another node makes it", testComeAndGone},
		{"delivered twice, made once", testOnce},
		{"a refused decision fails alone", testRefusedDecision},
		{"a decision whose caller has left is not made", testLeft},
		{"forgotten and expired", testGone},
		{"a device that connected does not expire", testExpiry},
		{"keys, policy and rotation", testFleetFacts},
		{"codes and keys of the console", testConsoleCodes},
		{"grants", testGrants},
		{"the snapshot", testSnapshot},
		{"refused clients, and the key of their hashes", testRefused},
		{"old changes go", testPruneChanges},
		{"a time in the changes", testSince},
		{"a long list is cut", testLongList},
		{"changes whose caller has left", testLate},
		{"text that Postgres refuses, decided", testDecidedText},
		{"while the database is away", testDecideAway},
		{"nodes of an older version are named", testOldNodes},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, makeDatabase(t)) })
	}
}

// openLedgers opens several ledgers on one database. Those of Postgres have a store
// each, as nodes do; a SQLite file has one node.
// noDeadlock takes the log of a ledger, which repeats a transaction that deadlocked and says so.
type noDeadlock struct{ t testing.TB }

// Write implements io.Writer.
func (w noDeadlock) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("deadlock")) {
		w.t.Errorf("a transaction deadlocked: %s", p)
	}
	return len(p), nil
}

func openLedgers(t testing.TB, db Database, n int) (ledgers []*ledger.Ledger) {
	t.Helper()
	var shared *store.Store
	for range n {
		if shared == nil || db.Postgres {
			shared = openStore(t, db.URL)
		}
		l := ledger.New(shared, slog.New(slog.NewTextHandler(noDeadlock{t}, nil)))
		t.Cleanup(l.Close)
		ledgers = append(ledgers, l)
	}
	return ledgers
}

// openLedger opens a store with a ledger that are closed with the test.
func openLedger(t testing.TB, url string, options ...ledger.Option) *ledger.Ledger {
	t.Helper()
	l := ledger.New(openStore(t, url), slog.New(slog.DiscardHandler), options...)
	t.Cleanup(l.Close)
	return l
}

// decide makes one decision that must succeed.
func decide(t testing.TB, l *ledger.Ledger, id devices.ID, change func(m *devices.Member)) devices.Outcome {
	t.Helper()
	out, err := l.Decide(t.Context(), []devices.Decision{decision(id, change)})
	if err != nil {
		t.Fatal(err)
	}
	if out[0].Err != nil {
		t.Fatal(out[0].Err)
	}
	return out[0]
}

// AddMember makes a device a member with its client and name, as a decision of an operator.
func AddMember(t testing.TB, s *store.Store, d devices.Device) {
	t.Helper()
	l := ledger.New(s, slog.New(slog.DiscardHandler))
	defer l.Close()
	decide(t, l, d.ID, func(m *devices.Member) {
		member(m)
		m.ClientID, m.Name = d.ClientID, d.Name
	})
}

func decision(id devices.ID, change func(m *devices.Member)) devices.Decision {
	return devices.Decision{ID: fmt.Sprintf("%016x", rand.Uint64()), Device: id, Who: "test", Decide: func(m *devices.Member) error {
		change(m)
		return nil
	}}
}

// member makes a device a member.
func member(m *devices.Member) { m.Admission = devices.AdmissionMember }

// edit sets a label.
func setLabel(m *devices.Member, key, value string) {
	if m.Labels == nil {
		m.Labels = map[string]string{}
	}
	m.Labels[key] = value
}

func testTwoAspects(t *testing.T, db Database) {
	nodes := openLedgers(t, db, 2)
	const n = 100
	decide(t, nodes[0], "x", member)
	var both sync.WaitGroup
	for which, l := range nodes {
		both.Go(func() {
			for i := range n {
				decide(t, l, "x", func(m *devices.Member) {
					if which == 0 {
						m.Name = fmt.Sprint(i)
					} else {
						setLabel(m, "n", fmt.Sprint(i))
					}
				})
			}
		})
	}
	both.Wait()
	got := decide(t, nodes[0], "x", func(*devices.Member) {})
	if got.Before.Name != fmt.Sprint(n-1) || got.Before.Labels["n"] != fmt.Sprint(n-1) || len(got.Changes) != 0 {
		t.Errorf("%+v", got)
	}
	if changes := allChanges(t, nodes[1]); len(changes) != 2*n+1 || got.Before.Revision != int64(2*n+1) {
		t.Errorf("%d changes, the device is at revision %d", len(changes), got.Before.Revision)
	}
}

// allChanges reads the whole log and checks that its revisions have no gaps.
func allChanges(t testing.TB, l *ledger.Ledger) (all []devices.Change) {
	t.Helper()
	for {
		page, err := l.Changes(t.Context(), int64(len(all))+1, 777)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		all = append(all, page...)
	}
	for i, c := range all {
		if c.Revision != int64(i)+1 {
			t.Fatalf("change %d has revision %d", i+1, c.Revision)
		}
	}
	head, err := l.Head(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(all); head.Revision != int64(n) || n > 0 && head.ID != all[n-1].ID || head.Lineage == "" {
		t.Errorf("%d changes, the head is %+v", n, head)
	}
	return all
}

// A transaction is held open between taking the revision and COMMIT while others
// commit: a reader by revision gets all changes, in order.
func testSlowTransaction(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	decide(t, l, "x", member)
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	var gate sync.RWMutex // no decision begins while it is locked
	var deciding, decided, pages atomic.Int64
	const deciders = 4
	for i := range deciders {
		others.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				gate.RLock()
				deciding.Add(1)
				gate.RUnlock()
				decide(t, l, mac(i), func(m *devices.Member) { member(m); m.Name = fmt.Sprint(n) })
				deciding.Add(-1)
				decided.Add(1)
			}
		})
	}
	followed := make(chan []devices.Change)
	go func() {
		var seen []devices.Change
		for ctx.Err() == nil {
			page, err := l.Changes(context.WithoutCancel(ctx), int64(len(seen))+1, 100)
			if err != nil {
				t.Error(err)
			}
			seen = append(seen, page...)
			pages.Add(1)
		}
		followed <- seen
	}()
	for n := range 10 {
		conn, err := db.Raw.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		run := func(text string, args ...any) {
			if _, err := conn.ExecContext(ctx, text, args...); err != nil {
				t.Fatal(err)
			}
		}
		gate.Lock() // SQLite gives the lock to the first connection that retries
		if db.Postgres {
			run("BEGIN")
		} else {
			run("BEGIN IMMEDIATE")
		}
		gate.Unlock()
		var revision int64
		if err := conn.QueryRowContext(ctx, `UPDATE fleet_revision SET n = n + 1 RETURNING n`).Scan(&revision); err != nil {
			t.Fatal(err)
		}
		run(`INSERT INTO changes VALUES ($1, $2, 'slow', 'name', '"x"', 'test', 1)`, revision, fmt.Sprint("slow-", n))
		read := pages.Load()
		devicetest.Eventually(t, "others decide, and the reader has read twice", func() bool { return deciding.Load() == deciders && pages.Load() >= read+2 })
		made := decided.Load()
		run("COMMIT")
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		devicetest.Eventually(t, "others have decided", func() bool { return decided.Load() > made })
	}
	cancel()
	others.Wait()
	seen := <-followed
	all := allChanges(t, l)
	slow := 0
	for i, c := range seen {
		if c.ID != all[i].ID {
			t.Fatalf("at revision %d it got %s, and there is %s", c.Revision, c.ID, all[i].ID)
		}
		if c.Device == "slow" {
			slow++
		}
	}
	if slow < 9 || len(all) < 15 {
		t.Errorf("%d slow changes among %d", slow, len(seen))
	}
}

// randomDecision is one of those that a fleet makes.
func randomDecision(r *rand.Rand, id devices.ID) devices.Decision {
	d := devices.Decision{ID: fmt.Sprintf("%016x", r.Uint64()), Device: id, Who: "test"}
	pick, text, key := r.IntN(16), fmt.Sprint(r.IntN(4)), fmt.Sprint("k", r.IntN(3))
	d.Import = pick >= 11 && pick != 14
	d.Once = r.IntN(3) == 0
	d.Decide = func(m *devices.Member) error {
		switch {
		case pick == 0 && !m.Known():
			m.Admission, m.ClientID, m.JoinTransport = devices.AdmissionMember, text, devices.TransportMQTT
		case pick == 1:
			m.Admission = devices.AdmissionMember
		case pick == 2:
			m.Admission = devices.AdmissionRevoked
			m.Generation, m.Reason = m.Generation+1, "revoked"
		case pick == 14:
			m.Refused = m.Refused.With(text)
		case !m.Known() && pick < 11:
			return devices.ErrNotFound
		case pick == 3:
			m.Admission = devices.AdmissionForgotten
			if m.Generation > 0 {
				m.Generation++
			}
		case pick == 4:
			m.Admission = devices.AdmissionExpired
		case pick == 5:
			m.Previous, m.PreviousUntil = m.Generation, start.Add(time.Hour+time.Nanosecond)
			m.Generation, m.Reason = m.Generation+1, "rotated"
		case pick < 8:
			setLabel(m, key, text)
		case pick == 8:
			delete(m.Labels, key)
		case pick == 9:
			m.Prefer = devices.Transport(text)
		case pick == 10:
			m.JoinTransport = devices.TransportNone
		default:
			m.Admit(text)
			setLabel(m, key, text)
			m.Name, m.Serial = "Näme "+text, text
		}
		return nil
	}
	return d
}

// Random decisions by several nodes: the changes folded in their order are what
// the tables contain, and the counts are those of the tables.
func testFold(t *testing.T, db Database) {
	nodes := openLedgers(t, db, 2)
	const ids, rounds = 12, 40
	var all sync.WaitGroup
	for which, l := range nodes {
		for worker := range 3 {
			all.Go(func() {
				r := rand.New(rand.NewPCG(uint64(which), uint64(worker)))
				for round := range rounds {
					var list []devices.Decision
					for range 1 + r.IntN(5) + 60*(round%20/19) {
						list = append(list, randomDecision(r, mac(r.IntN(ids))))
					}
					out, err := l.Decide(t.Context(), list)
					if err != nil {
						t.Error(err)
					}
					for i, o := range out {
						checkOutcome(t, &list[i], &o)
					}
				}
			})
		}
	}
	all.Wait()
	checkFold(t, db, nodes[0])
	checkCounts(t, db)
}

// checkOutcome folds an outcome's changes.
func checkOutcome(t *testing.T, d *devices.Decision, o *devices.Outcome) {
	m := o.Before.Clone()
	for _, c := range o.Changes {
		if err := m.Fold(c); err != nil {
			t.Error(err)
		}
		if c.Revision <= o.Before.Revision || c.Revision > 1<<40 {
			t.Errorf("revision %d after %d", c.Revision, o.Before.Revision)
		}
	}
	if len(o.Changes) > 0 && (!same(&m, &o.After) || o.Changes[0].ID != d.ID) {
		t.Errorf("folded %+v, the outcome has %+v", m, o.After)
	}
	if d.Import && len(o.Changes) > 1 {
		t.Errorf("%d changes of one import", len(o.Changes))
	}
}

// same compares members; no labels are none.
func same(a, b *devices.Member) bool {
	x, y := *a, *b
	if !maps.Equal(x.Labels, y.Labels) {
		return false
	}
	x.Labels, y.Labels = nil, nil
	return reflect.DeepEqual(x, y)
}

// checkFold compares the tables with the fold of all changes.
func checkFold(t *testing.T, db Database, l *ledger.Ledger) {
	t.Helper()
	folded := map[devices.ID]*devices.Member{}
	for _, c := range allChanges(t, l) {
		m := folded[c.Device]
		if m == nil {
			m = &devices.Member{ID: c.Device}
			folded[c.Device] = m
		}
		if err := m.Fold(c); err != nil {
			t.Fatal(err)
		}
	}
	known, labels := 0, 0
	for id, want := range folded {
		got := decide(t, l, id, func(*devices.Member) {}).Before
		if !want.Known() { // what is left is in the credentials alone
			want.Revision = 0
		}
		if want.JoinTransport != got.JoinTransport && got.JoinTransport == devices.TransportNone {
			want.JoinTransport = devices.TransportNone // cleared without a change
		}
		if !same(want, &got) {
			t.Errorf("folded %+v, the tables have %+v", *want, got)
		}
		if want.Known() {
			known++
		}
		labels += len(want.Labels)
		for key, value := range want.Labels {
			if db.Count(t, `SELECT count(*) FROM device_labels WHERE key = $1 AND value = $2 AND device = $3`, key, value, string(id)) != 1 {
				t.Errorf("no row of label %s=%s of %s", key, value, id)
			}
		}
		x, excepted := want.Exception()
		rows := db.Count(t, `SELECT count(*) FROM credential_exceptions WHERE device = $1 AND generation = $2 AND revoked = $3 AND previous = $4`, string(id), x.Generation, x.Revoked, x.Previous)
		if all := db.Count(t, `SELECT count(*) FROM credential_exceptions WHERE device = $1`, string(id)); excepted && rows != 1 || !want.Known() && !excepted && all != 0 {
			t.Errorf("exception %+v, %v: %d rows, %d of the device", x, excepted, rows, all)
		}
	}
	for table, want := range map[string]int{"devices": known, "presence": known, "device_labels": labels} {
		if got := db.Count(t, `SELECT count(*) FROM `+table); got != want {
			t.Errorf("%d rows in %s, want %d", got, table, want)
		}
	}
}

// checkCounts compares fleet_counts with the tables.
func checkCounts(t *testing.T, db Database) {
	t.Helper()
	read := func(query string) map[string]int {
		counts := map[string]int{}
		rows, err := db.Raw.Query(query)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		for rows.Next() {
			var dimension, value string
			var n int
			if err := rows.Scan(&dimension, &value, &n); err != nil {
				t.Fatal(err)
			}
			if n != 0 {
				counts[dimension+"="+value] = n
			}
		}
		return counts
	}
	got := read(`SELECT dimension, value, sum(n) FROM fleet_counts GROUP BY dimension, value`)
	want := read(`SELECT 'board', board, count(*) FROM devices GROUP BY board
 UNION ALL SELECT 'firmware', firmware, count(*) FROM devices GROUP BY firmware
 UNION ALL SELECT 'state', 'revoked', count(*) FROM devices WHERE admission <> 'member'
 UNION ALL SELECT 'state', CASE WHEN online THEN 'online' ELSE 'offline' END, count(*) FROM presence GROUP BY online
 UNION ALL SELECT 'offline_reason', reason, count(*) FROM presence WHERE NOT online GROUP BY reason
 UNION ALL SELECT 'transport', transport, count(*) FROM presence WHERE online GROUP BY transport
 UNION ALL SELECT 'node', node, count(*) FROM presence WHERE online GROUP BY node
 UNION ALL SELECT 'mcp_state', mcp_state, count(*) FROM presence GROUP BY mcp_state
 UNION ALL SELECT 'catalog', catalog, count(*) FROM presence WHERE catalog <> '' GROUP BY catalog`)
	if !maps.Equal(got, want) {
		t.Errorf("counts are %v, the tables have %v", got, want)
	}
}

// A device that comes and goes within one transaction leaves no row to lock;
// another node that makes it at the same time comes before or after, not between.
func testComeAndGone(t *testing.T, db Database) {
	nodes := openLedgers(t, db, 2)
	forget := func(m *devices.Member) { m.Admission = devices.AdmissionForgotten }
	var both sync.WaitGroup
	for which, l := range nodes {
		both.Go(func() {
			for i := range 150 {
				list := []devices.Decision{decision(mac(i), member)}
				if which == 0 {
					list = append(list, decision(mac(i), forget))
				}
				if _, err := l.Decide(t.Context(), list); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both.Wait()
	checkFold(t, db, nodes[0])
	checkCounts(t, db)
}

// Ledgers that decide about the same devices, lists in any order, neither
// deadlock nor lose anything.
func testLedgers(t *testing.T, db Database) {
	const nodes, ids, rounds = 4, 40, 25
	var all sync.WaitGroup
	var made [nodes]int
	var first *ledger.Ledger
	for which, l := range openLedgers(t, db, nodes) {
		first = l
		all.Go(func() {
			r := rand.New(rand.NewPCG(7, uint64(which)))
			for round := range rounds {
				var list []devices.Decision
				for _, i := range r.Perm(ids)[:ids/2] {
					list = append(list, decision(mac(i), func(m *devices.Member) {
						if (i+round)%9 == 0 && m.Known() {
							m.Admission = devices.AdmissionForgotten
							return
						}
						member(m)
						setLabel(m, fmt.Sprint("node-", which), fmt.Sprint(round))
					}))
				}
				out, err := l.Decide(t.Context(), list)
				if err != nil {
					t.Error(err)
				}
				for _, o := range out {
					if o.Err != nil {
						t.Error(o.Err)
					}
					made[which] += len(o.Changes)
				}
			}
		})
	}
	all.Wait()
	if changes := allChanges(t, first); len(changes) != made[0]+made[1]+made[2]+made[3] {
		t.Errorf("%d changes, want %v", len(changes), made)
	}
	checkFold(t, db, first)
	checkCounts(t, db)
}

func testOnce(t *testing.T, db Database) {
	l, other := openLedger(t, db.URL), openLedger(t, db.URL)
	decide(t, l, "x", member)
	d := decision("x", func(m *devices.Member) { m.Generation++ })
	d.Once = true
	var both sync.WaitGroup
	for _, node := range []*ledger.Ledger{l, other, l, other} {
		both.Go(func() {
			if _, err := node.Decide(t.Context(), []devices.Decision{d, d}); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	if got := decide(t, l, "x", func(*devices.Member) {}).Before; got.Generation != 1 {
		t.Errorf("made %d times", got.Generation)
	}
	if n := len(allChanges(t, l)); n != 2 {
		t.Errorf("%d changes, want 2", n)
	}
}

func testRefusedDecision(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	decide(t, l, "first", func(m *devices.Member) { member(m); m.Name = "taken" })
	db.Exec(t, `CREATE UNIQUE INDEX poison ON devices (name)`)
	refusal := errors.New("no")
	var list []devices.Decision
	for i := range 45 {
		list = append(list, decision(mac(i), func(m *devices.Member) { member(m); m.Name = fmt.Sprint(i) }))
		switch i {
		case 7, 40:
			list[i] = decision(mac(i), func(m *devices.Member) { member(m); m.Name = "taken" })
		case 9:
			list[i].Decide = func(*devices.Member) error { return refusal }
		case 11:
			list[i].Device = "bad\x00id"
		}
	}
	out, err := l.Decide(t.Context(), list)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range out {
		if bad := i == 7 || i == 40 || i == 9 || i == 11; (o.Err != nil) != bad || (len(o.Changes) > 0) == bad {
			t.Errorf("decision %d: %v, %d changes", i, o.Err, len(o.Changes))
		}
	}
	mustBe(t, out[9].Err, refusal)
	if n := db.Count(t, `SELECT count(*) FROM devices`); n != 42 {
		t.Errorf("%d devices, want 42", n)
	}
	allChanges(t, l)
	checkCounts(t, db)
}

func testLeft(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	decide(t, l, "x", member)
	deciding, release := make(chan struct{}), make(chan struct{})
	first := make(chan error, 1)
	go func() {
		_, err := l.Decide(context.WithoutCancel(t.Context()), []devices.Decision{decision("x", func(m *devices.Member) {
			close(deciding)
			<-release
			m.Name = "first"
		})})
		first <- err
	}()
	<-deciding
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error, 1)
	go func() {
		_, err := l.Decide(ctx, []devices.Decision{decision("x", func(m *devices.Member) { m.Name = "second" })})
		second <- err
	}()
	cancel()
	mustBe(t, <-second, context.Canceled)
	close(release)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	if got := decide(t, l, "x", func(*devices.Member) {}).Before.Name; got != "first" {
		t.Errorf("the name is %q", got)
	}
}

func testGone(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	for _, id := range []devices.ID{"plain", "rotated"} {
		decide(t, l, id, func(m *devices.Member) { member(m); setLabel(m, "a", "b") })
		db.Exec(t, `INSERT INTO catalog_history VALUES ($1, 1, 1, '', '', '', FALSE, 1)`, string(id))
		db.Exec(t, `INSERT INTO device_images VALUES ($1, 1, 'elf', '', '', '', '', 1)`, string(id))
		db.Exec(t, `INSERT INTO firmware_devices VALUES ($1, 1, 'two flashes', 0)`, string(id))
	}
	decide(t, l, "rotated", func(m *devices.Member) { m.Generation, m.Reason = 3, "rotated" })
	for _, id := range []devices.ID{"plain", "rotated"} {
		decide(t, l, id, func(m *devices.Member) { m.Admission = devices.AdmissionForgotten })
		if again := decide(t, l, id, func(m *devices.Member) { m.Admission = devices.AdmissionForgotten }); len(again.Changes) != 0 {
			t.Errorf("forgotten twice: %+v", again)
		}
	}
	for table, want := range map[string]int{"devices": 0, "presence": 0, "device_labels": 0, "catalog_history": 0, "device_images": 0, "firmware_devices": 0, "credential_exceptions": 1} {
		if got := db.Count(t, `SELECT count(*) FROM `+table); got != want {
			t.Errorf("%d rows in %s, want %d", got, table, want)
		}
	}
	if got := decide(t, l, "rotated", member).After; got.Generation != 3 || len(got.Labels) != 0 {
		t.Errorf("back: %+v", got)
	}
	// Forgotten and back within one transaction.
	out, err := l.Decide(t.Context(), []devices.Decision{
		decision("rotated", func(m *devices.Member) { m.Admission = devices.AdmissionForgotten }), decision("rotated", member),
		decision("new", member), decision("new", func(m *devices.Member) { m.Admission = devices.AdmissionForgotten }),
	})
	if err != nil || len(out[1].Changes) != 1 || out[1].After.Revision <= out[0].After.Revision {
		t.Fatalf("%+v, %v", out, err)
	}
	checkFold(t, db, l)
	checkCounts(t, db)
}

func testExpiry(t *testing.T, db Database) {
	now := start
	l := openLedger(t, db.URL, ledger.Clock(func() time.Time { return now }))
	join := func(transport devices.Transport) func(m *devices.Member) {
		return func(m *devices.Member) { m.Admission, m.JoinTransport = devices.AdmissionMember, transport }
	}
	for _, id := range []devices.ID{"gone", "connected", "edited"} {
		decide(t, l, id, join(devices.TransportMQTT))
	}
	decide(t, l, "ws", join(devices.TransportWebSocket))
	decide(t, l, "edited", func(m *devices.Member) { m.Name = "lamp" })
	expired := func(want ...devices.ID) {
		t.Helper()
		if got, err := l.Expired(t.Context(), now, 10); err != nil || !slices.Equal(got, want) {
			t.Errorf("expired %v, %v; want %v", got, err, want)
		}
	}
	expired()
	now = now.Add(25 * time.Hour)
	expired("connected", "gone")
	db.Exec(t, `UPDATE presence SET epoch = 7 WHERE device = 'connected'`)
	expired("gone")
	for _, id := range []devices.ID{"gone", "connected"} {
		decide(t, l, id, func(m *devices.Member) { m.Admission = devices.AdmissionExpired })
	}
	if got := decide(t, l, "connected", func(*devices.Member) {}).Before; !got.Known() || got.JoinTransport != devices.TransportNone {
		t.Errorf("it has connected, and is %+v", got)
	}
	if got := decide(t, l, "gone", func(*devices.Member) {}).Before; got.Known() {
		t.Error("it did not expire")
	}
	db.Exec(t, `UPDATE presence SET epoch = 8 WHERE device = 'ws'`)
	if n, err := l.ClearJoined(t.Context()); n != 1 || err != nil {
		t.Errorf("%d devices have connected, %v", n, err)
	}
	now = now.Add(31 * 24 * time.Hour)
	expired()
}

// testConsoleCodes checks that a code works once, on one of two nodes, until it expires, and that what has
// ended is deleted.
func testConsoleCodes(t *testing.T, db Database) {
	l, other := openLedger(t, db.URL), openLedger(t, db.URL)
	child := access.Key{Scopes: access.AllScopes(), Tools: []string{"*get*"}, Parent: access.Parent{Key: "abcdefgh", Name: "key"}}
	for _, hash := range []string{"a", "b", "c"} {
		if err := l.SaveCode(t.Context(), hash, []byte(`{"of":"`+hash+`"}`), start.Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	if document, err := other.ReadCode(t.Context(), "a", start); err != nil || string(document) != `{"of":"a"}` {
		t.Errorf("read: %s, %v", document, err)
	}
	_, err := l.ReadCode(t.Context(), "b", start.Add(time.Minute))
	mustBe(t, err, devices.ErrNotFound)
	// security: K19
	if document, err := other.TakeCode(t.Context(), "a", start.Add(59*time.Second)); err != nil || string(document) != `{"of":"a"}` {
		t.Errorf("on another node: %s, %v", document, err)
	}
	_, err = l.TakeCode(t.Context(), "a", start)
	mustBe(t, err, devices.ErrNotFound)
	_, err = l.TakeCode(t.Context(), "b", start.Add(time.Minute))
	mustBe(t, err, devices.ErrNotFound)
	_, err = l.TakeCode(t.Context(), "none", start)
	mustBe(t, err, devices.ErrNotFound)
	if _, err := l.SaveKey(t.Context(), "test", "key", access.Key{ID: "abcdefgh", Name: "key", Created: start}); err != nil {
		t.Fatal(err)
	}
	child.ID, child.Expires = "consolek", start.Add(12*time.Hour)
	if _, err := l.SaveKey(t.Context(), "test", "console", child); err != nil {
		t.Fatal(err)
	}
	// The webhook acts with the rights of the child.
	db.Exec(t, `INSERT INTO webhooks VALUES ('wh_1', 'abcdefgh/consolek', '', '', '[]', '', 0, '', 0, 1, '', '', 0, 0, 0, '', '', 0, 0)`)
	for i, tc := range []struct {
		at          time.Time
		codes, keys int64
	}{{start.Add(time.Minute), 1, 2}, {child.Expires.Add(access.KeepConsoleKeys), 0, 2}, {child.Expires.Add(access.KeepConsoleKeys + 2*ledger.PruneEvery), 0, 2}, {child.Expires.Add(access.KeepConsoleKeys + 4*ledger.PruneEvery), 0, 1}} {
		if i == 3 {
			db.Exec(t, `DELETE FROM webhooks`)
		}
		if _, err := l.Prune(t.Context(), tc.at); err != nil {
			t.Fatal(err)
		}
		if codes, keys := db.Count(t, `SELECT count(*) FROM console_codes`), db.Count(t, `SELECT count(*) FROM api_keys`); int64(codes) != tc.codes || int64(keys) != tc.keys {
			t.Errorf("at %v: %d codes, %d keys", tc.at, codes, keys)
		}
	}
}

// testGrants checks that a refresh token is replaced once, whichever nodes try, and that what was not used for long is deleted
// with its key.
func testGrants(t *testing.T, db Database) {
	l, other := openLedger(t, db.URL), openLedger(t, db.URL)
	if _, err := l.SaveKey(t.Context(), "test", "grant", access.Key{ID: "grantaaa", Parent: access.Parent{Key: "abcdefgh"}, Grant: &access.Grant{Host: "app.example"}, Created: start}); err != nil {
		t.Fatal(err)
	}
	first := access.GrantUse{ID: "grantaaa", Refresh: "one", Used: start, Address: "192.0.2.1"}
	if err := l.SaveGrant(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	next := access.GrantUse{ID: "grantaaa", Refresh: "two", Used: start.Add(time.Minute), Address: "192.0.2.2"}
	want := access.GrantUse{ID: "grantaaa", Refresh: "two", Previous: "one", Rotated: next.Used, Used: next.Used, Address: "192.0.2.2"}
	// security: H25
	for _, tc := range []struct {
		l     *ledger.Ledger
		old   string
		moved bool
	}{{l, "zero", false}, {other, "one", true}, {l, "one", false}, {other, "one", false}} {
		use, moved, err := tc.l.RotateGrant(t.Context(), tc.old, next)
		if err != nil || moved != tc.moved || tc.moved && !reflect.DeepEqual(use, want) {
			t.Errorf("from %s: %+v, %v, %v", tc.old, use, moved, err)
		}
	}
	late := next
	late.Used = next.Used.Add(access.GrantIdle)
	if _, moved, err := l.RotateGrant(t.Context(), "two", late); err != nil || moved {
		t.Errorf("unused for long: %v, %v", moved, err)
	}
	if uses, err := l.GrantUses(t.Context()); err != nil || len(uses) != 1 || !reflect.DeepEqual(uses[0], want) {
		t.Errorf("%+v, %v", uses, err)
	}
	_, _, err := l.RotateGrant(t.Context(), "one", access.GrantUse{ID: "none"})
	mustBe(t, err, devices.ErrNotFound)
	for _, tc := range []struct {
		after time.Duration
		left  int
	}{{access.GrantIdle, 1}, {access.GrantIdle + access.KeepGrants + 2*ledger.PruneEvery, 0}} {
		if _, err := l.Prune(t.Context(), next.Used.Add(tc.after)); err != nil {
			t.Fatal(err)
		}
		if grants, keys := db.Count(t, `SELECT count(*) FROM oauth_grants`), db.Count(t, `SELECT count(*) FROM api_keys`); grants != tc.left || keys != tc.left {
			t.Errorf("after %v: %d grants, %d keys", tc.after, grants, keys)
		}
	}
}

func testFleetFacts(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	k := access.Key{ID: "abcdefgh", Name: "key", Created: start}
	save := func(k access.Key, want int) {
		t.Helper()
		if changes, err := l.SaveKey(t.Context(), "test", "id", k); err != nil || len(changes) != want || want > 0 && changes[0].Aspect != devices.AspectKey {
			t.Errorf("%+v, %v", changes, err)
		}
	}
	save(k, 1)
	save(k, 0)
	k.Revoked = start.Add(time.Hour)
	save(k, 1)
	k.Revoked = start.Add(2 * time.Hour)
	save(k, 0)
	if changes, err := l.SavePolicy(t.Context(), "test", access.Policy{Version: 1}); err != nil || len(changes) != 1 {
		t.Errorf("%+v, %v", changes, err)
	}
	_, err := l.SavePolicy(t.Context(), "test", access.Policy{Version: 1})
	mustBe(t, err, devices.ErrConflict)
	decide(t, l, "x", func(m *devices.Member) { member(m); m.Generation = 4 })
	raise := func(old devices.Rotation, highest int64) (devices.Rotation, error) {
		return devices.Rotation{Generation: max(old.Generation, highest) + 1, Previous: old.Generation, PreviousUntil: start}, nil
	}
	for _, want := range []int64{5, 6} {
		changes, err := l.Rotate(t.Context(), "test", raise)
		var r devices.Rotation
		if err != nil || json.Unmarshal(changes[0].Value, &r) != nil || r.Generation != want {
			t.Errorf("%+v, %v", changes, err)
		}
	}
	var of devices.Rotation
	with := decision("x", nil)
	with.DecideWith = func(_ *devices.Member, r devices.Rotation) error { of = r; return nil }
	if out, err := openLedger(t, db.URL).Decide(t.Context(), []devices.Decision{with, with}); err != nil || out[1].Err != nil || of.Generation != 6 {
		t.Errorf("a decision with the rotation got %+v: %v", of, err)
	}
	_, err = l.Rotate(t.Context(), "test", func(devices.Rotation, int64) (devices.Rotation, error) {
		return devices.Rotation{}, devices.ErrNotFound
	})
	mustBe(t, err, devices.ErrNotFound)
	if n := len(allChanges(t, l)); n != 7 {
		t.Errorf("%d changes, want 7", n)
	}
	s, err := l.Snapshot(t.Context(), func(devices.Member) {})
	if err != nil || len(s.Keys) != 1 || !s.Keys[0].Revoked.Equal(start.Add(time.Hour)) || s.Policy.Version != 1 || s.Rotation.Generation != 6 ||
		len(s.Exceptions) != 1 || s.Exceptions[0].Generation != 4 || s.Revision != 7 {
		t.Errorf("%+v, %v", s, err)
	}
	lineage, err := l.SetLineage(t.Context())
	if head, _ := l.Head(t.Context()); err != nil || lineage == s.Lineage || head.Lineage != lineage {
		t.Errorf("%q after %q: %v", lineage, s.Lineage, err)
	}
}

// Refused clients are kept with the credentials, also of an unknown device; the key by which clients are shown is made once
// for all nodes.
func testRefused(t *testing.T, db Database) {
	nodes := openLedgers(t, db, 2)
	var making sync.WaitGroup
	var keys [2]devices.ClientKey
	for i, l := range nodes {
		making.Go(func() {
			s, err := l.Snapshot(t.Context(), func(devices.Member) {})
			if err != nil {
				t.Error(err)
			}
			keys[i] = s.ClientKey
		})
	}
	making.Wait()
	if len(keys[0]) < 32 || keys[0] != keys[1] || db.Count(t, `SELECT count(*) FROM fleet WHERE key = 'client_key'`) != 1 {
		t.Errorf("the keys of two nodes: %q", keys)
	}
	const text = "a \"client\" é\n"
	refuse := func(m *devices.Member) { m.Refused = m.Refused.With("x").With(text) }
	decide(t, nodes[0], "unknown", refuse)
	decide(t, nodes[0], "member", member)
	decide(t, nodes[0], "member", refuse)
	decide(t, nodes[0], "member", func(m *devices.Member) { m.Admission = devices.AdmissionForgotten })
	decide(t, nodes[0], "approved", refuse)
	decide(t, nodes[0], "approved", func(m *devices.Member) { m.Admit("x") })
	decide(t, nodes[0], "approved", func(m *devices.Member) { m.Admit(text) })
	members := 0
	s, err := nodes[1].Snapshot(t.Context(), func(devices.Member) { members++ })
	if err != nil || members != 1 || s.ClientKey != keys[0] {
		t.Fatalf("%+v, %d members, %v", s, members, err)
	}
	refused := map[devices.ID]bool{}
	for _, x := range s.Exceptions {
		refused[x.Device] = x.Refused.Has(text) && x.Refused.Has("x")
	}
	if want := map[devices.ID]bool{"unknown": true, "member": true, "approved": false}; !maps.Equal(refused, want) {
		t.Errorf("refused in the snapshot: %v, want %v", refused, want)
	}
}

// A snapshot is of one revision, however much is written meanwhile.
func testSnapshot(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	decide(t, l, "x", func(m *devices.Member) {
		m.Admission, m.ClientID, m.Prefer = devices.AdmissionRevoked, "client\x1fid", devices.TransportMQTT
	})
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				decide(t, l, mac(n), member)
			}
		}
	})
	for range 20 {
		members := map[devices.ID]devices.Member{}
		s, err := l.Snapshot(t.Context(), func(m devices.Member) { members[m.ID] = m })
		if err != nil {
			t.Fatal(err)
		}
		x := members["x"]
		if s.Revision != int64(len(members))+2 || x.Admission != devices.AdmissionRevoked || x.ClientID != "client\x1fid" || x.Prefer != devices.TransportMQTT {
			t.Errorf("%d members at revision %d; %+v", len(members), s.Revision, x)
		}
		page, err := l.Changes(t.Context(), s.Revision, 1)
		if err != nil || page[0].ID != s.ID {
			t.Errorf("the last change is %q, want %+v, %v", s.ID, page, err)
		}
	}
	close(stop)
	writing.Wait()
}

func testPruneChanges(t *testing.T, db Database) {
	now := start
	l := openLedger(t, db.URL, ledger.Clock(func() time.Time { return now }))
	name := func(id devices.ID, n int) {
		var list []devices.Decision
		for i := range n {
			list = append(list, decision(id, func(m *devices.Member) { member(m); m.Serial = fmt.Sprint(now, i) }))
		}
		if _, err := l.Decide(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	prune := func(want int) {
		t.Helper()
		if n, err := l.Prune(t.Context(), now); err != nil || n != want {
			t.Errorf("%d changes deleted, %v; want %d", n, err, want)
		}
	}
	name("few", 40)   // the first of a device is two changes
	name("many", 700) // more than one statement deletes
	prune(0)
	now = now.Add(91 * 24 * time.Hour)
	name("few", 40)
	prune(601)
	prune(0)
	_, err := l.Changes(t.Context(), 42, 10)
	mustBe(t, err, devices.ErrPruned)
	// A node that follows from before what is gone must not take its end for that of the log.
	_, err = l.Changes(t.Context(), 1, 100)
	mustBe(t, err, devices.ErrPruned)
	if page, err := l.Changes(t.Context(), 1, 41); err != nil || len(page) != 41 {
		t.Errorf("%d changes before what is gone, %v", len(page), err)
	}
	now = now.Add(91 * 24 * time.Hour)
	name("few", 40) // 121 in all
	prune(21)
	if page, err := l.DeviceChanges(t.Context(), "few", 0, 500); err != nil || len(page) != 100 || page[0].Revision < page[99].Revision {
		t.Errorf("%d changes of few, %v", len(page), err)
	}
	if page, err := l.DeviceChanges(t.Context(), "many", 0, 500); err != nil || len(page) != 100 {
		t.Errorf("%d changes of many, %v", len(page), err)
	}
}

func testSince(t *testing.T, db Database) {
	now := start
	l := openLedger(t, db.URL, ledger.Clock(func() time.Time { return now }))
	for i := range 50 {
		now = start.Add(time.Duration(i) * time.Hour)
		decide(t, l, mac(i), member)
	}
	for _, test := range []struct {
		since time.Time
		after int64
		want  int
	}{{time.Time{}, 0, 50}, {time.Time{}, 20, 30}, {start.Add(40 * time.Hour), 0, 10}, {start.Add(40*time.Hour + 1000), 0, 9}, {start.Add(99 * time.Hour), 0, 0}, {start, 45, 5}} {
		if page, err := l.ChangesSince(t.Context(), test.since, test.after, 100); err != nil || len(page) != test.want {
			t.Errorf("since %s after %d: %d changes, %v; want %d", test.since, test.after, len(page), err, test.want)
		}
	}
}

// Decisions of others go between the batches of a long list.
func testLongList(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	const n = 3000
	var list []devices.Decision
	for i := range n {
		d := decision(mac(i), func(m *devices.Member) { member(m); setLabel(m, "n", fmt.Sprint(i)) })
		d.Import = true
		list = append(list, d)
	}
	done := make(chan struct{})
	var out []devices.Outcome
	go func() {
		defer close(done)
		var err error
		if out, err = l.Decide(t.Context(), list); err != nil {
			t.Error(err)
		}
	}()
	between := 0
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
			decide(t, l, "single", func(m *devices.Member) { member(m); m.Name = fmt.Sprint(between) })
			between++
		}
	}
	for i, o := range out {
		if o.Err != nil || len(o.Changes) != 1 || o.After.ID != mac(i) || o.After.Labels["n"] != fmt.Sprint(i) {
			t.Fatalf("outcome %d: %+v", i, o)
		}
	}
	if between < 3 {
		t.Errorf("%d decisions between the batches", between)
	}
	checkCounts(t, db)
}

// testLate: each change that is committed reaches its caller, or is handed over.
func testLate(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	var mu sync.Mutex
	seen := map[int64]bool{}
	take := func(list []devices.Change) {
		mu.Lock()
		defer mu.Unlock()
		for _, c := range list {
			if seen[c.Revision] {
				t.Errorf("change %d twice", c.Revision)
			}
			seen[c.Revision] = true
		}
	}
	l.OnLateChanges(take)
	const n = 300
	for _, count := range []int{1, 10, n} { // alone, in a group, in batches
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan struct{})
		var list []devices.Decision
		for i := range count {
			list = append(list, decision(mac(count<<16+i), func(m *devices.Member) {
				if member(m); i == count/2 {
					leave()
					<-left
				}
			}))
		}
		if out, err := l.Decide(ctx, list); !errors.Is(err, devices.ErrDatabase) {
			t.Errorf("the caller left: %v, %v", out, err)
		}
		leave()
		close(left)
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	if _, err := l.Rotate(ctx, "test", func(devices.Rotation, int64) (devices.Rotation, error) {
		leave()
		<-left
		return devices.Rotation{Generation: 1}, nil
	}); !errors.Is(err, devices.ErrDatabase) {
		t.Errorf("the caller left: %v", err)
	}
	close(left)
	take(decide(t, l, "last", member).Changes)
	log := allChanges(t, l)
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != len(log) || len(log) < 13 {
		t.Errorf("%d changes were seen, of %d", len(seen), len(log))
	}
}

func testDecidedText(t *testing.T, db Database) {
	l := openLedger(t, db.URL)
	decide(t, l, "x", func(m *devices.Member) {
		member(m)
		m.Name, m.ClientID, m.Serial, m.Reason, m.Generation = "a\x00b\xff", "\xff", "\x00", "\x00", 1
		setLabel(m, "k\x00", "v\xff<&>")
	})
	got := decide(t, l, "x", func(*devices.Member) {}).Before
	if got.Name != "a\uFFFDb\uFFFD" || got.Labels["k\uFFFD"] != "v\uFFFD<&>" || strings.Contains(got.Reason, "\x00") {
		t.Errorf("%+v", got)
	}
	checkFold(t, db, l)
}

// awayHost is a store whose database is away once it is set.
type awayHost struct {
	database.Host
	away  atomic.Bool
	asked atomic.Int64 // calls of Usable
}

func (h *awayHost) Usable() error {
	away := h.away.Load()
	h.asked.Add(1)
	if away {
		return devices.ErrDatabase
	}
	return h.Host.Usable()
}

// While the database is away decisions fail at once, those that wait included.
func testDecideAway(t *testing.T, db Database) {
	host := &awayHost{Host: openStore(t, db.URL)}
	l := ledger.New(host, slog.New(slog.DiscardHandler))
	defer l.Close()
	decide(t, l, "x", member)
	deciding, release := make(chan struct{}), make(chan struct{})
	first, second := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := l.Decide(context.WithoutCancel(t.Context()), []devices.Decision{decision("x", func(*devices.Member) {
			close(deciding)
			<-release
		})})
		first <- err
	}()
	<-deciding
	asked := host.asked.Load()
	go func() {
		_, err := l.Decide(context.WithoutCancel(t.Context()), []devices.Decision{decision("x", member)})
		second <- err
	}()
	devicetest.Eventually(t, "the second was accepted, and waits", func() bool { return host.asked.Load() > asked })
	host.away.Store(true)
	close(release)
	mustBe(t, <-second, devices.ErrDatabase)
	if err := <-first; err != nil {
		t.Error(err)
	}
	_, err := l.Decide(t.Context(), []devices.Decision{decision("x", member)})
	mustBe(t, err, devices.ErrDatabase)
	_, err = l.Head(t.Context())
	mustBe(t, err, devices.ErrDatabase)
	_, err = l.Snapshot(t.Context(), func(devices.Member) {})
	mustBe(t, err, devices.ErrDatabase)
}
