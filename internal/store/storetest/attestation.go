package storetest

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/store"
)

func testAttestation(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	ctx := t.Context()
	key := func(serial string, id devices.ID) devices.AttestationKey {
		k := devices.AttestationKey{Serial: serial, Device: id, Sealed: "sealed " + serial, ImportedAt: start}
		if id != "" {
			k.BoundAt = start
		}
		return k
	}
	_, err := s.AttestationKey(ctx, "a")
	mustBe(t, err, devices.ErrNotFound)
	mustBe(t, s.BindAttestationKey(ctx, "a", "x", start), devices.ErrNotFound)
	mustBe(t, s.RemoveAttestationKey(ctx, "a"), devices.ErrNotFound)
	if err := s.SaveAttestationKeys(ctx, []devices.AttestationKey{key("B", ""), key("a", "x"), key("c", "")}); err != nil {
		t.Fatal(err)
	}
	keys, err := s.AttestationKeys(ctx, "", 2)
	if err != nil || !reflect.DeepEqual(keys, []devices.AttestationKey{key("B", ""), key("a", "x")}) {
		t.Errorf("%+v, %v", keys, err)
	}
	if keys, err = s.AttestationKeys(ctx, "a", 10); err != nil || len(keys) != 1 || keys[0].Serial != "c" {
		t.Errorf("%+v, %v", keys, err)
	}
	// One number, one device.
	later := start.Add(time.Hour)
	mustBe(t, s.BindAttestationKey(ctx, "a", "y", later), devices.ErrBound)
	mustBe(t, s.BindAttestationKey(ctx, "B", "x", later), devices.ErrBound)
	for range 2 { // a repetition changes nothing
		if err := s.BindAttestationKey(ctx, "B", "y", later); err != nil {
			t.Error(err)
		}
	}
	if serial, err := s.ProvenBy(ctx, "y"); err != nil || serial != "B" {
		t.Errorf("%s, %v", serial, err)
	}
	_, err = s.ProvenBy(ctx, "nobody")
	mustBe(t, err, devices.ErrNotFound)
	// A new key keeps what its number is bound to; another device is the
	// operator's word. Of an import that cannot be all nothing is.
	again := key("B", "")
	again.Sealed = "new"
	if err := s.SaveAttestationKeys(ctx, []devices.AttestationKey{again}); err != nil {
		t.Fatal(err)
	}
	if k, err := s.AttestationKey(ctx, "B"); err != nil || k.Device != "y" || k.Sealed != "new" || !k.BoundAt.Equal(later) {
		t.Errorf("%+v, %v", k, err)
	}
	mustBe(t, s.SaveAttestationKeys(ctx, []devices.AttestationKey{key("d", ""), key("e", "x")}), devices.ErrBound)
	_, err = s.AttestationKey(ctx, "d")
	mustBe(t, err, devices.ErrNotFound)
	if err := s.SaveAttestationKeys(ctx, []devices.AttestationKey{key("B", "z")}); err != nil {
		t.Error(err)
	}
	if err := s.RemoveAttestationKey(ctx, "a"); err != nil {
		t.Error(err)
	}
	if err := s.BindAttestationKey(ctx, "c", "x", later); err != nil {
		t.Errorf("the device of a removed key: %v", err)
	}
}

// Of many nodes that bind the same number, or the same device, at once one
// succeeds.
func testAttestationRace(t *testing.T, db Database) {
	one, two := openStore(t, db.URL), openStore(t, db.URL)
	var keys []devices.AttestationKey
	for i := range 8 {
		keys = append(keys, devices.AttestationKey{Serial: fmt.Sprint("s", i), Sealed: "x", ImportedAt: start})
	}
	if err := one.SaveAttestationKeys(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	var bound atomic.Int32
	var wg sync.WaitGroup
	try := func(serial string, id devices.ID) {
		for _, s := range []*store.Store{one, two} {
			wg.Go(func() {
				switch err := s.BindAttestationKey(t.Context(), serial, id, start); {
				case err == nil:
					bound.Add(1)
				case !errors.Is(err, devices.ErrBound) && !errors.Is(err, devices.ErrDatabase): // SQLite has one writer
					t.Error(err)
				}
			})
		}
	}
	for i := range 8 {
		try(fmt.Sprint("s", i), "same")
	}
	wg.Wait()
	if n := db.Count(t, `SELECT count(*) FROM attestation_keys WHERE device = 'same'`); n != 1 {
		t.Errorf("%d numbers prove one device", n)
	}
	if bound.Load() < 1 || bound.Load() > 2 { // both stores may have bound the same number
		t.Errorf("%d bindings", bound.Load())
	}
}
