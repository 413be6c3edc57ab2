package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devices/registry"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
	"fleetd/internal/selector"
)

func wantUnavailable(t *testing.T, what string, err error) {
	t.Helper()
	if e := devices.AsError(err); err == nil || e.Code != devices.CodeUnavailable || e.Part != "database" {
		t.Errorf("%s: %v", what, err)
	}
}

// Without the database no device joins, members are served, and devices that need
// approval are pending.
func TestBootsWithoutTheDatabase(t *testing.T) {
	for _, approve := range []bool{false, true} {
		t.Run(fmt.Sprintf("approve %v", approve), func(t *testing.T) {
			bubble(t, fleet.Config{Approve: approve}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
				p.Put(devices.Member{ID: id, ClientID: "c1"})
				p.SetAway(true)
				if w := check(t, s, "c1"); !w.Admitted {
					t.Errorf("a member: %+v", w)
				}
				if w := check(t, s, "c2"); w.Admitted || w.Code == "" {
					t.Errorf("another client under its id: %+v", w)
				}
				connect(t, s, "c1", devicetest.NewScript())
				ready(t, s)
				if err := setVolume(t, s); err != nil {
					t.Errorf("a call: %v", err)
				}
				const unknown = devices.ID("02:00:00:00:00:33")
				w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: unknown, ClientID: "c"})
				if approve {
					if err != nil || w.Admitted || w.Code == "" {
						t.Errorf("an unknown device that is pending: %+v, %v", w, err)
					}
					_, err = s.Approve(t.Context(), devicetest.Admin, w.Code, "")
				}
				wantUnavailable(t, "approval of an unknown device", err)
				_, err = s.Accept(devices.Identity{Device: unknown, ClientID: "c", Transport: devices.TransportMQTT, Verified: true}, idle{})
				if approve && devices.AsError(err).Code != devices.CodeUnauthorized {
					t.Errorf("an unknown device with credentials: %v", err)
				} else if !approve {
					wantUnavailable(t, "an unknown device with credentials", err)
				}
				if s.IsMember(unknown) {
					t.Error("the unknown device is a member")
				}
				p.SetAway(false)
				switch w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: unknown, ClientID: "c"}); {
				case err != nil:
					t.Error(err)
				case w.Admitted == approve:
					t.Errorf("when the database is back: %+v", w)
				}
				if !approve { // the database takes longer than a device waits
					p.Ledger.SetDelay(2 * registry.JoinLimit)
					begun := time.Now()
					_, err := s.CheckIn(t.Context(), admission.CheckIn{Device: "02:00:00:00:00:34", ClientID: "c"})
					wantUnavailable(t, "a slow database", err)
					if took := time.Since(begun); took != registry.JoinLimit {
						t.Errorf("the check-in waited for %v", took)
					}
				}
			})
		})
	}
}

// Decisions fail at once without the database, except a revocation.
func TestDecisionsWithoutTheDatabase(t *testing.T) {
	dir := t.TempDir()
	bubble(t, fleet.Config{Dir: dir}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1", Name: "lamp"})
		conn := connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		p.SetAway(true)
		begun := time.Now()
		name := "oven"
		edit := fleet.Edit{Name: &name}
		wantUnavailable(t, "edit", s.Edit(t.Context(), devicetest.Admin, id, 0, edit))
		wantUnavailable(t, "forget", s.Forget(t.Context(), devicetest.Admin, id))
		wantUnavailable(t, "rotate", s.Rotate(t.Context(), devicetest.Admin, id, time.Hour))
		_, _, err := s.EditAll(t.Context(), devicetest.Admin, selector.Selector{}, edit)
		wantUnavailable(t, "edit all", err)
		_, err = s.SetPolicy(t.Context(), devicetest.Admin, access.Policy{}, 0)
		wantUnavailable(t, "policy", err)
		if took := time.Since(begun); took > 0 {
			t.Errorf("they waited for %v", took)
		}
		r, err := s.Revoke(t.Context(), devicetest.Admin, id)
		if err != nil || r.Recorded || !slices.Equal(r.Nodes, []string{"n-test"}) {
			t.Fatalf("revoke: %+v, %v", r, err)
		}
		synctest.Wait()
		if conn.reason() != devices.CloseRevoked {
			t.Errorf("the session was closed as %q", conn.reason())
		}
		if w := check(t, s, "c1"); w.Admitted {
			t.Error("a revoked device is admitted")
		}
		_, err = s.Approve(t.Context(), devicetest.Admin, string(id), "")
		wantUnavailable(t, "approve before the revocation is recorded", err)
		p.SetAway(false)
		_, err = s.Approve(t.Context(), devicetest.Admin, string(id), "")
		wantUnavailable(t, "approve when the database is back, before the revocation is recorded", err)
		devicetest.Refresh(t, s)
		synctest.Wait()
		if m, _ := p.Ledger.Member(id); m.Admission != devices.AdmissionRevoked || m.Generation != 1 || m.Name != "lamp" {
			t.Errorf("recorded: %+v", m)
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id), ""); err != nil {
			t.Fatal(err)
		}
		if w := check(t, s, "c1"); !w.Admitted || w.Generation != 1 {
			t.Errorf("approved: %+v", w)
		}
	})
}

// A decision of another node ends the session here.
func TestDecisionsElsewhere(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		there := p.Service(t, fleet.Config{Node: "there"})
		check(t, s, "c1")
		conn := connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		devicetest.Refresh(t, there)
		name := "lamp"
		if err := there.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Name: &name}); err != nil {
			t.Fatal(err)
		}
		at := s.Registry().Position().Revision
		s.Registry().Offer(p.Ledger.Log(at))
		if d := state(t, s).Device; d.Name != name {
			t.Errorf("it is named %q", d.Name)
		}
		if err := revoke(t, there, id); err != nil {
			t.Fatal(err)
		}
		if conn.reason() != "" {
			t.Fatalf("closed as %q before this node received the decision", conn.reason())
		}
		s.Registry().Offer(p.Ledger.Log(at + 1))
		synctest.Wait()
		if conn.reason() != devices.CloseRevoked {
			t.Errorf("closed as %q", conn.reason())
		}
		if v := state(t, s); v.State != devices.StateOffline || v.Device.Admission != devices.AdmissionRevoked {
			t.Errorf("a revoked device that has not checked in again is %s, %s", v.State, v.Device.Admission)
		}
		check(t, s, "c1")
		if v := state(t, s); v.State != devices.StatePending || !waits(v, "c1") {
			t.Errorf("a revoked device that checks in again is %s, %v", v.State, v.Pending)
		}
	})
}

// A session that has no row of its device yet keeps the stored list, and its own list is
// recorded once when the row arrives.
func TestRowArrivesLate(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		first := connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		first.session.Close(devices.CloseGone)
		_, stored, _, _ := p.Of(id)
		if stored.Catalog == (devices.Hash{}) || stored.Tools != 2 {
			t.Fatalf("%+v", stored)
		}
		p.SlowRows(time.Second)
		time.Sleep(time.Second)
		b := p.Service(t, fleet.Config{Node: "b"})
		silent := devicetest.NewScript()
		silent.Other = func(devicetest.Request) string { return "silent" }
		gone := connect(t, b, "c1", silent)
		if _, row, _, _ := p.Of(id); !row.Online || row.Node != "b" || row.Catalog != stored.Catalog || row.Tools != stored.Tools {
			t.Errorf("while the device is connected the row is %+v", row)
		}
		gone.session.Close(devices.CloseGone)
		time.Sleep(5 * time.Second)
		if _, row, _, _ := p.Of(id); row.Online || row.Catalog != stored.Catalog || row.Tools != stored.Tools {
			t.Errorf("afterwards the row is %+v", row)
		}
		c := p.Service(t, fleet.Config{Node: "c"})
		script := devicetest.NewScript()
		script.Tools = `[` + devicetest.Volume + `]`
		connect(t, c, "c1", script)
		synctest.Wait()
		if n := len(p.Seen(devices.EventCatalog)); n != 1 || len(p.Entries) != 1 {
			t.Errorf("before the row arrives there are %d events, %d entries", n, len(p.Entries))
		}
		if err := setVolume(t, c); err != nil {
			t.Errorf("a call does not need the row: %v", err)
		}
		time.Sleep(5 * time.Second)
		events := p.Seen(devices.EventCatalog)
		if len(events) != 2 || len(p.Entries) != 2 || !strings.Contains(string(events[1].Fields), `"added":[],"removed":["self.reboot"]`) {
			t.Errorf("%d entries, events %s", len(p.Entries), events[len(events)-1].Fields)
		}
		if e := p.Entries[1]; e.Firmware != "2.4.2" {
			t.Errorf("the entry is of firmware %q", e.Firmware)
		}
		if _, row, _, _ := p.Of(id); row.Catalog == stored.Catalog || row.Tools != 1 {
			t.Errorf("the row is %+v", row)
		}
		// The same list on another node adds no entry, and the row keeps it.
		connect(t, p.Service(t, fleet.Config{Node: "d"}), "c1", script)
		time.Sleep(5 * time.Second)
		if _, row, _, _ := p.Of(id); len(p.Entries) != 2 || row.Node != "d" || row.Tools != 1 {
			t.Errorf("%d entries, the row is %+v", len(p.Entries), row)
		}
		// The list of a device that disconnects before its row arrives adds an entry, too.
		left := connect(t, p.Service(t, fleet.Config{Node: "e"}), "c1", devicetest.NewScript())
		synctest.Wait()
		left.session.Close(devices.CloseGone)
		time.Sleep(5 * time.Second)
		if _, row, _, _ := p.Of(id); len(p.Entries) != 3 || row.Online || row.Catalog != stored.Catalog || len(p.Seen(devices.EventCatalog)) != 3 {
			t.Errorf("%d entries, the row is %+v", len(p.Entries), row)
		}
	})
}

// Rules that depend on labels wait briefly for them, and a call that they cannot decide
// is refused.
func TestRulesWaitForLabels(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1", Labels: map[string]string{"room": "lab"}})
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "lab", Tools: []string{"self.reboot"}, Devices: selector.FromMap(map[string]string{"room": "lab"}), Action: access.Deny}}})
		for _, c := range []struct{ row, waits time.Duration }{{100 * time.Millisecond, 100 * time.Millisecond}, {time.Minute, registry.RowLimit}} {
			p.SlowRows(c.row)
			b := p.Service(t, fleet.Config{Node: fmt.Sprint("b", c.row)})
			connect(t, b, "c1", devicetest.NewScript())
			begun := time.Now()
			_, err := call(t, b, "self.reboot", `{}`)
			// security: K3
			if took := time.Since(begun); took != c.waits {
				t.Errorf("for a row that takes %v the call waited %v", c.row, took)
			}
			if c.row < registry.RowLimit {
				// security: K3
				if err == nil || err.Rule != "policy:lab" {
					t.Errorf("when the row has arrived: %v", err)
				}
				continue
			}
			// security: K3
			if err == nil || err.Code != devices.CodeUnavailable || err.Part != "database" || err.Sent {
				t.Errorf("without the row: %v", err)
			}
		}
	})
}

// Rules by labels that arrive while a call waits for its turn do not treat unread labels
// as missing.
func TestRulesByLabelComeWhileACallWaits(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		p.Put(devices.Member{ID: id, ClientID: "c1", Labels: map[string]string{"room": "lab"}})
		p.SlowRows(time.Minute)
		var asked atomic.Int32
		script := devicetest.NewScript()
		script.Call = func(string, json.RawMessage) string {
			asked.Add(1)
			time.Sleep(5 * time.Second)
			return devicetest.True
		}
		connect(t, s, "c1", script)
		synctest.Wait()
		first, second := make(chan *devices.Error, 1), make(chan *devices.Error, 1)
		go func() { first <- setVolume(t, s) }()
		synctest.Wait()
		go func() { second <- setVolume(t, s) }()
		synctest.Wait()
		devicetest.SetPolicy(t, s, access.Policy{Rules: []access.Rule{{Name: "lab", Tools: []string{"*"}, Devices: selector.FromMap(map[string]string{"room": "lab"}), Action: access.Deny}}})
		if err := <-first; err != nil {
			t.Error(err)
		}
		// security: K11
		if err := <-second; err == nil || err.Code != devices.CodeUnavailable || asked.Load() != 1 {
			t.Errorf("the call that waited: %v; the device received %d calls", err, asked.Load())
		}
	})
}

// ids returns the ids of a page.
func ids(views []devices.View) (out []devices.ID) {
	for _, v := range views {
		out = append(out, v.Device.ID)
	}
	return out
}

// Pending devices are in no table: lists show them at the position of their ids, on one
// page each.
func TestWaitingDevicesInLists(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		of := func(n int) devices.ID { return devices.ID(fmt.Sprintf("02:00:00:00:00:%02x", n)) }
		var all []devices.ID
		for n := range 40 {
			all = append(all, of(n))
			switch n % 5 {
			case 0: // pending, and never a member
				if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: of(n), ClientID: "c", Facts: devices.Facts{Board: "box"}}); err != nil {
					t.Fatal(err)
				}
			case 1:
				p.Put(devices.Member{ID: of(n), ClientID: "c"})
			case 2: // a member with another pending client
				p.Put(devices.Member{ID: of(n), ClientID: "c", Name: fmt.Sprintf("N%02d", 40-n)})
				if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: of(n), ClientID: "other"}); err != nil {
					t.Fatal(err)
				}
			case 3, 4: // connected, and without or with another pending client
				p.Put(devices.Member{ID: of(n), ClientID: "c"})
				if _, err := s.Accept(devices.Identity{Device: of(n), ClientID: "c", Transport: devices.TransportMQTT}, idle{}); err != nil {
					t.Fatal(err)
				}
				if n%5 == 4 {
					if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: of(n), ClientID: "other"}); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		every := func(rest ...int) (some []devices.ID) {
			for n := range all {
				if slices.Contains(rest, n%5) {
					some = append(some, of(n))
				}
			}
			return some
		}
		for text, want := range map[string][]devices.ID{
			"":                           all,
			"state=pending":              every(0, 2, 4),
			"state in (pending,online)":  every(0, 2, 3, 4),
			"state in (pending,offline)": every(0, 1, 2, 4),
			"state!=pending":             every(1, 3),
			"state=offline":              every(1),
			"state=online":               every(3, 4),
			"board=box":                  every(0),
		} {
			sel, err := selector.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			for _, limit := range []int{1, 3, 7, 1000} {
				var got []devices.ID
				q := devices.ListQuery{Select: sel, Limit: limit}
				for pages := 0; ; pages++ {
					views, next, err := s.List(t.Context(), q)
					if err != nil || len(views) > limit || pages > 100 {
						t.Fatalf("%s: page %d with %d devices: %v", text, pages, len(views), err)
					}
					got = append(got, ids(views)...)
					if q.After = next; next == "" {
						break
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("%q by %d: %v, not %v", text, limit, got, want)
				}
			}
		}
		// Lists by name contain only known devices.
		name := func(n int) string {
			if n%5 == 2 {
				return fmt.Sprintf("N%02d", 40-n)
			}
			return ""
		}
		for text, rest := range map[string][]int{"state=pending": {2, 4}, "state in (pending,online)": {2, 3, 4}, "state in (pending,offline)": {1, 2, 4}, "": {1, 2, 3, 4}} {
			var want []string
			for n := range all {
				if slices.Contains(rest, n%5) {
					want = append(want, name(n)+" "+string(of(n)))
				}
			}
			slices.Sort(want)
			sel, err := selector.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			q := devices.ListQuery{Select: sel, Sort: devices.SortName, Limit: 3}
			var got []string
			for pages := 0; ; pages++ {
				views, next, err := s.List(t.Context(), q)
				if err != nil || len(views) > q.Limit || pages > 100 {
					t.Fatalf("%s: page %d with %d devices: %v", text, pages, len(views), err)
				}
				for _, v := range views {
					got = append(got, v.Device.Name+" "+string(v.Device.ID))
				}
				if q.After = next; next == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%q by name: %v, not %v", text, got, want)
			}
		}
	})
}

// A limited key sees and edits only its devices, whatever the selector.
func TestEditAllIsForTheKeysDevices(t *testing.T) {
	p := devicetest.New()
	for n := range 2500 {
		p.Put(devices.Member{ID: devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", n>>8, n&255)), Labels: map[string]string{"room": []string{"lab", "hall"}[n%2]}})
	}
	s := p.Service(t, fleet.Config{})
	lab := principalWith(t, access.ViaREST, "devices:read devices:write", "room=lab")
	seen := 0
	if err := s.Each(t.Context(), lab, selector.Selector{}, func(page []devices.View) error {
		for _, v := range page {
			if v.Device.Labels["room"] != "lab" {
				t.Fatalf("%s is shown", v.Device.ID)
			}
		}
		seen += len(page)
		return nil
	}); err != nil || seen != 1250 {
		t.Errorf("%d devices, %v", seen, err)
	}
	floor := "1"
	for _, c := range []struct {
		principal        access.Principal
		sel              string
		matched, changed int
	}{{lab, "room=hall", 0, 0}, {lab, "", 1250, 1250}, {lab, "", 1250, 0}, {devicetest.Admin, "!floor", 1250, 1250}, {devicetest.Admin, "", 2500, 0}} {
		sel, err := selector.Parse(c.sel)
		if err != nil {
			t.Fatal(err)
		}
		matched, changed, err := s.EditAll(t.Context(), c.principal, sel, fleet.Edit{Labels: map[string]*string{"floor": &floor}})
		if err != nil || matched != c.matched || changed != c.changed {
			t.Errorf("%q by %s: %d matched, %d changed, %v", c.sel, c.principal.Name(), matched, changed, err)
		}
	}
	// A device that has left the key's selector since the page was read is not edited.
	const moved = devices.ID("02:00:00:00:00:00")
	records := &moving{Ports: p, id: moved}
	other := p.ServiceOver(t, fleet.Config{Node: "other"}, func(ports *fleet.Ports) { ports.Records = records })
	name := "mine"
	matched, _, err := other.EditAll(t.Context(), lab, selector.Selector{}, fleet.Edit{Name: &name})
	if m, _ := p.Ledger.Member(moved); err != nil || matched != 1249 || m.Name != "" || m.Labels["room"] != "hall" {
		t.Errorf("%d matched, %v; the device that moved is %+v", matched, err, m)
	}
	// Nor is a device that no longer matches the selector.
	records.id = "02:00:00:00:00:02"
	sel, err := selector.Parse("room=lab")
	if err != nil {
		t.Fatal(err)
	}
	name = "selected"
	matched, _, err = other.EditAll(t.Context(), devicetest.Admin, sel, fleet.Edit{Name: &name})
	if m, _ := p.Ledger.Member(records.id); err != nil || matched != 1248 || m.Name == name || m.Labels["room"] != "hall" {
		t.Errorf("%d matched, %v; the device that moved is %+v", matched, err, m)
	}
}

// A device whose edit is refused is counted as one that matches, and the error names it after the others were changed.
func TestEditAllNamesWhatIsRefused(t *testing.T) {
	p := devicetest.New()
	full := map[string]string{}
	for n := range fleet.MaxLabels {
		full[fmt.Sprint("label", n)] = "x"
	}
	p.Put(devices.Member{ID: "a"})
	p.Put(devices.Member{ID: "b", Labels: full})
	p.Put(devices.Member{ID: "c"})
	s := p.Service(t, fleet.Config{})
	floor := "1"
	matched, changed, err := s.EditAll(t.Context(), devicetest.Admin, selector.Selector{}, fleet.Edit{Labels: map[string]*string{"floor": &floor}})
	if codeOf(err) != devices.CodeBadRequest || !strings.Contains(err.Error(), "b would have 65 labels") || matched != 3 || changed != 2 {
		t.Errorf("%d matched, %d changed, %v", matched, changed, err)
	}
}

// A caller that leaves while a selection is counted does not cancel the count for others.
func TestCountsOutliveTheirCaller(t *testing.T) {
	p := devicetest.New()
	p.Put(devices.Member{ID: id, Labels: map[string]string{"room": "lab"}})
	records := &slowCounts{Ports: p, begun: make(chan struct{}), proceed: make(chan struct{})}
	s := p.ServiceOver(t, fleet.Config{}, func(ports *fleet.Ports) { ports.Records = records })
	sel := selector.FromMap(map[string]string{"room": "lab"})
	ctx, leave := context.WithCancel(t.Context())
	first := make(chan error)
	go func() {
		_, err := s.Counts(ctx, devicetest.Admin, sel)
		first <- err
	}()
	<-records.begun
	leave()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that left got %v", err)
	}
	close(records.proceed)
	if counts, err := s.Counts(t.Context(), devicetest.Admin, sel); err != nil || counts.Total != 1 {
		t.Errorf("%d devices, %v", counts.Total, err)
	}
}

// slowCounts is a database whose counts block until released.
type slowCounts struct {
	*devicetest.Ports
	begun, proceed chan struct{}
}

func (c *slowCounts) CountsOf(ctx context.Context, q devices.ListQuery) (devices.Counts, error) {
	close(c.begun)
	select {
	case <-c.proceed:
		return c.Ports.CountsOf(ctx, q)
	case <-ctx.Done():
		return devices.Counts{}, ctx.Err()
	}
}

// moving is a database in which a device changes its room after a list was read.
type moving struct {
	*devicetest.Ports
	id devices.ID
}

func (m *moving) List(ctx context.Context, q devices.ListQuery) (devices.Page, error) {
	page, err := m.Ports.List(ctx, q)
	m.Put(devices.Member{ID: m.id, Labels: map[string]string{"room": "hall"}})
	return page, err
}

// Entries of disconnected devices are removed after a while, without losing stored
// state.
func TestIdleEntriesAreRemoved(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		const count = 100
		for n := range count {
			x := &pipe{script: devicetest.NewScript()}
			session, err := s.Accept(devices.Identity{Device: devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", n)), ClientID: "c", Transport: devices.TransportMQTT}, x)
			if err != nil {
				t.Fatal(err)
			}
			x.session = session
			session.StartMCP(devices.FeaturesMCP)
			synctest.Wait()
			session.Close(devices.CloseGone)
		}
		connect(t, s, "c1", devicetest.NewScript())
		ready(t, s)
		if n := s.Entries(); n != count+1 {
			t.Fatalf("%d entries", n)
		}
		time.Sleep(time.Minute)
		if n := s.Entries(); n != count+1 {
			t.Errorf("%d entries after a minute: takeovers of a device are forgotten", n)
		}
		time.Sleep(30 * time.Minute)
		if n := s.Entries(); n != 1 {
			t.Errorf("%d entries after half an hour, one device is connected", n)
		}
		entries := len(p.Entries)
		const again = devices.ID("02:00:00:00:01:07")
		v, err := s.Get(t.Context(), again)
		if err != nil || v.State != devices.StateOffline || v.CatalogState != devices.CatalogStale || v.Presence.Tools != 2 {
			t.Errorf("%+v, %v", v, err)
		}
		x := &pipe{script: devicetest.NewScript()}
		if x.session, err = s.Accept(devices.Identity{Device: again, ClientID: "c", Transport: devices.TransportMQTT}, x); err != nil {
			t.Fatal(err)
		}
		if x.session.Epoch() <= v.Presence.Epoch {
			t.Errorf("epoch %d after %d", x.session.Epoch(), v.Presence.Epoch)
		}
		x.session.StartMCP(devices.FeaturesMCP)
		synctest.Wait()
		if len(p.Entries) != entries || len(p.Seen(devices.EventCatalog)) != entries {
			t.Errorf("an unchanged list added an entry: %d after %d", len(p.Entries), entries)
		}
	})
}
