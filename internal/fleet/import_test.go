package fleet_test

import (
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// An import makes no more members than the fleet may have, and says so before it
// writes anything.
func TestImportKeepsTheLimit(t *testing.T) {
	p := devicetest.New()
	s := p.Service(t, fleet.Config{Members: 3})
	p.Put(devices.Member{ID: "a"})
	rows := []fleet.ImportRow{{Device: "b"}, {Device: "a"}, {Device: "c"}, {Device: "d"}}
	// What earlier rows of the file would make takes room as well.
	if got, err := s.CheckImport(t.Context(), devicetest.Admin, rows, false, 2); err != nil || got[0].Err == nil || got[1].Err != nil || got[2].Err == nil {
		t.Errorf("after two others: %+v, %v", got, err)
	}
	for _, write := range []bool{false, true} {
		got, err := s.CheckImport(t.Context(), devicetest.Admin, rows, false, 0)
		if write {
			got, err = s.Import(t.Context(), devicetest.Admin, rows, false, func() { t.Error("the next rows may be imported before these count") })
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []fleet.Imported{{Created: true, FirstClient: true}, {FirstClient: true}, {Created: true, FirstClient: true}} {
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
}

// A revocation that waits for the database is not undone by an import that is
// faster.
func TestImportWhileARevocationWaits(t *testing.T) {
	p := devicetest.New()
	s := p.Service(t, fleet.Config{})
	p.Put(devices.Member{ID: "a", ClientID: "c"})
	p.SetAway(true)
	if r, err := s.Revoke(t.Context(), devicetest.Admin, "a"); err != nil || r.Recorded {
		t.Fatal(r, err)
	}
	p.SetAway(false) // and nobody has noticed yet
	name := "x"
	got, err := s.Import(t.Context(), devicetest.Admin, []fleet.ImportRow{{Device: "a", Name: &name}}, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	// It is refused, or the revocation was recorded first and the import admits it again.
	if m, _ := p.Ledger.Member("a"); got[0].Err == nil && m.Generation < 2 || got[0].Err != nil && m.Name != "" {
		t.Errorf("%+v, %+v", got, m)
	}
}
