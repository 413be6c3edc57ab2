package fleet_test

import (
	"strings"
	"testing"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// An import creates no more members than the limit allows, and reports that before it
// writes anything.
func TestImportKeepsTheLimit(t *testing.T) {
	p := devicetest.New()
	s := p.Service(t, fleet.Config{Members: 3})
	p.Put(devices.Member{ID: "a"})
	rows := []fleet.ImportRow{{Device: "b"}, {Device: "a"}, {Device: "c"}, {Device: "d"}}
	// Earlier rows of the file count towards the limit.
	if got, err := s.CheckImport(t.Context(), devicetest.Admin, rows, false, 2); err != nil || got[0].Err == nil || got[1].Err != nil || got[2].Err == nil {
		t.Errorf("after two others: %+v, %v", got, err)
	}
	for _, write := range []bool{false, true} {
		got, err := s.CheckImport(t.Context(), devicetest.Admin, rows, false, 0)
		if write {
			got, err = s.Import(t.Context(), devicetest.Admin, rows, false, func() { t.Error("committed was called before these rows are counted") })
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []fleet.ImportResult{{Created: true, FirstClient: true}, {FirstClient: true}, {Created: true, FirstClient: true}} {
			if got[i] != want {
				t.Errorf("row %d: %+v", i, got[i])
			}
		}
		if err := got[3].Err; err == nil || !strings.Contains(err.Error(), "--members-limit") {
			t.Errorf("%v", err)
		}
	}
	if n := s.Registry().Members(); n != 3 {
		t.Errorf("%d members", n)
	}
	// A limited key does not learn from it which devices there are.
	got, err := s.CheckImport(t.Context(), principalWith(t, access.ViaREST, "devices:write", "room=lab"), []fleet.ImportRow{{Device: "a"}, {Device: "d"}}, false, 0)
	if err != nil || got[0].Err == nil || got[1].Err == nil || got[0].Err.Error() != got[1].Err.Error() {
		t.Errorf("a device that the key does not cover, and an unknown one: %+v, %v", got, err)
	}
}

// An import does not undo a revocation that waits for the database.
func TestImportWhileARevocationWaits(t *testing.T) {
	p := devicetest.New()
	s := p.Service(t, fleet.Config{})
	p.Put(devices.Member{ID: "a", ClientID: "c"})
	p.SetAway(true)
	if r, err := s.Revoke(t.Context(), devicetest.Admin, "a"); err != nil || r.Recorded {
		t.Fatal(r, err)
	}
	p.SetAway(false) // the node has not noticed yet
	name := "x"
	got, err := s.Import(t.Context(), devicetest.Admin, []fleet.ImportRow{{Device: "a", Name: &name}}, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	// It is refused, or the revocation was written first and the import admits it again.
	if m, _ := p.Ledger.Member("a"); got[0].Err == nil && m.Generation < 2 || got[0].Err != nil && m.Name != "" {
		t.Errorf("%+v, %+v", got, m)
	}
}
