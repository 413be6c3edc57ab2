package fleet_test

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

func check(t *testing.T, s *fleet.Service, client string) admission.CheckInResult {
	t.Helper()
	w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: client, Board: "b", Firmware: "2.4.2"})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// revoke revokes a device; the database must record it.
func revoke(t *testing.T, s *fleet.Service, id devices.ID) error {
	t.Helper()
	r, err := s.Revoke(t.Context(), devicetest.Admin, id)
	if err == nil && !r.Recorded {
		err = errors.New("the revocation is not in the database")
	}
	return err
}

func TestOpenAdmission(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		if w := check(t, s, "c1"); !w.Admitted || w.Code != "" {
			t.Errorf("unknown device: %+v", w)
		}
		w := check(t, s, "c2")
		if w.Admitted || len(w.Code) != 6 || w.Challenge == "" {
			t.Errorf("known device, another client: %+v", w)
		}
		if again := check(t, s, "c2"); again.Code != w.Code {
			t.Error("the code changed between two checks")
		}
		if w := check(t, s, "c1"); !w.Admitted {
			t.Error("the pending clone locked the member out")
		}
		if events := p.Seen(devices.EventPending); len(events) != 1 {
			t.Errorf("%d pending events, want 1", len(events))
		}
		if got, err := s.Approve(t.Context(), devicetest.Admin, w.Code); err != nil || got != id {
			t.Fatalf("approve by code: %s, %v", got, err)
		}
		if w := check(t, s, "c2"); !w.Admitted || w.Generation != 1 {
			t.Errorf("approved: %+v", w)
		}
		if w := check(t, s, "c1"); w.Admitted {
			t.Error("the replaced client is still admitted")
		}
	})
}

// A device without a Client-Id is a member like others, until a client with one connects.
func TestWithoutClientID(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		if w := check(t, s, ""); !w.Admitted || !s.IsActivated(id, "") {
			t.Errorf("it joins: %+v", w)
		}
		p.SetAway(true)
		if w := check(t, s, ""); !w.Admitted {
			t.Errorf("a member without the database: %+v", w)
		}
		p.SetAway(false)
		if w := check(t, s, "c1"); !w.Admitted {
			t.Errorf("the first client with a Client-Id: %+v", w)
		}
		if w := check(t, s, ""); w.Admitted || w.Code == "" {
			t.Errorf("without one afterwards: %+v", w)
		}
	})
}

func TestApproveAdmission(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		w := check(t, s, "c1")
		if w.Admitted || s.IsActivated(id, "c1") {
			t.Fatalf("%+v", w)
		}
		check(t, s, "c1")
		if events := p.Seen(devices.EventPending); len(events) != 1 || string(events[0].Fields) != `"client_id":"c1","known":false` {
			t.Errorf("events %+v", events)
		}
		if v := state(t, s); v.State != devices.StatePending || v.Pending != "c1" {
			t.Errorf("%+v", v)
		}
		time.Sleep(admission.CodeLifetime)
		if again := check(t, s, "c1"); again.Code == w.Code {
			t.Error("the code is valid after its lifetime")
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code); err == nil {
			t.Error("an expired code is accepted")
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id)); err != nil {
			t.Fatal(err)
		}
		if w := check(t, s, "c1"); !w.Admitted || w.Generation != 0 || !s.IsActivated(id, "c1") || s.IsActivated(id, "c2") {
			t.Errorf("%+v", w)
		}
	})
}

// A client that checks in last under a pending device's id gains nothing by it.
func TestApproveByIDNeedsOneClient(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		owner := check(t, s, "owner")
		check(t, s, "attacker")
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id)); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("approval by id: %v", err)
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, owner.Code); err != nil || !s.IsActivated(id, "owner") || s.IsActivated(id, "attacker") {
			t.Errorf("approval by code: %v", err)
		}
	})
}

func TestWrongCodesAreLimited(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		w := check(t, s, "c1")
		wrong := "000000"
		if w.Code == wrong {
			wrong = "000001"
		}
		for range admission.MaxWrongCodes {
			if _, err := s.Approve(t.Context(), devicetest.Admin, wrong); devices.AsError(err).Code != devices.CodeDeviceUnknown {
				t.Fatal(err)
			}
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("the right code after %d wrong ones: %v", admission.MaxWrongCodes, err)
		}
		time.Sleep(2 * time.Minute)
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code); err != nil {
			t.Errorf("a minute later: %v", err)
		}
	})
}

func TestRevokeAndForgetEndCredentials(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		check(t, s, "c1")
		conn := connect(t, s, "c1", devicetest.NewScript())
		if err := revoke(t, s, id); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if conn.reason() != devices.CloseRevoked {
			t.Errorf("the session was closed as %q", conn.reason())
		}
		if _, ok := s.Generation(id); ok {
			t.Error("credentials are valid after revocation")
		}
		if w := check(t, s, "c1"); w.Admitted {
			t.Error("a revoked device is welcome")
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id)); err != nil {
			t.Fatal(err)
		}
		if generation, ok := s.Generation(id); !ok || generation != 1 {
			t.Errorf("generation %d, %v", generation, ok)
		}
		if err := s.Forget(t.Context(), devicetest.Admin, id); err != nil {
			t.Fatal(err)
		}
		if generation, _ := s.Generation(id); generation != 2 {
			t.Errorf("a forgotten device has generation %d, want 2", generation)
		}
		if w := check(t, s, "c9"); !w.Admitted || w.Generation != 2 {
			t.Errorf("it may join again with new credentials: %+v", w)
		}
		// A node that starts from the database has the same generation.
		again := p.Service(t, fleet.Config{})
		if generation, ok := again.Generation(id); generation != 2 || !ok {
			t.Errorf("after a restart: generation %d, %v", generation, ok)
		}
	})
}

// A device that was never admitted has no credentials that could be used again: it
// leaves no exception, neither when an operator forgets it nor when its code expires.
// A device that was admitted leaves its exception.
func TestUnadmittedDevicesLeaveNoException(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		come := func(n int) devices.ID {
			id := devices.ID(fmt.Sprintf("02:00:00:00:02:%02x", n))
			if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
				t.Fatal(err)
			}
			return id
		}
		if err := s.Forget(t.Context(), devicetest.Admin, come(1)); err != nil {
			t.Fatal(err)
		}
		come(2)
		time.Sleep(25 * time.Hour)
		synctest.Wait()
		// security: D15
		if log := p.Ledger.Log(0); len(p.Devices()) != 0 || len(log) != 0 {
			t.Errorf("%d devices and changes %+v are left of devices that were never admitted", len(p.Devices()), log)
		}
		admitted := come(3)
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(admitted)); err != nil {
			t.Fatal(err)
		}
		if err := s.Forget(t.Context(), devicetest.Admin, admitted); err != nil {
			t.Fatal(err)
		}
		if x := p.Ledger.Exceptions(); s.Accepts(admitted, 0) || len(x) != 1 {
			t.Errorf("the credentials of a forgotten member are valid: %+v", x)
		}
		revoked := come(4)
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(revoked)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(revoke(t, s, revoked), s.Forget(t.Context(), devicetest.Admin, revoked)); err != nil {
			t.Fatal(err)
		}
		if s.Accepts(revoked, 0) || s.Accepts(revoked, 1) {
			t.Error("the credentials of a device that was revoked and forgotten are valid")
		}
	})
}
