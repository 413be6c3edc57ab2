package fleet_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
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
	w, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: client, Facts: devices.Facts{Board: "b", Firmware: "2.4.2"}})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// waits reports whether these clients wait for approval, and no others.
func waits(v devices.View, clients ...string) bool {
	var list []string
	for _, w := range v.Pending {
		list = append(list, w.ClientID)
	}
	return slices.Equal(list, clients)
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
		if got, err := s.Approve(t.Context(), devicetest.Admin, w.Code, ""); err != nil || got != id {
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

// A device without a Client-Id is a member like others, until a client with one connects: that ends its session and its
// credentials.
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
		any := func(int64) bool { return true }
		if _, _, admitted := s.Authenticate(id, "", any); !admitted {
			t.Error("its credentials are not valid")
		}
		conn := &pipe{script: devicetest.NewScript()}
		if _, err := s.Accept(devices.Identity{Device: id, Transport: devices.TransportMQTT, Verified: true, OfClient: true}, conn); err != nil {
			t.Fatal(err)
		}
		if w := check(t, s, "c1"); !w.Admitted {
			t.Errorf("the first client with a Client-Id: %+v", w)
		}
		if w := check(t, s, ""); w.Admitted || !w.Refused || w.Code != "" {
			t.Errorf("without one afterwards: %+v", w)
		}
		synctest.Wait()
		if conn.reason() != devices.CloseRevoked {
			t.Errorf("its session was closed as %q", conn.reason())
		}
		if _, _, admitted := s.Authenticate(id, "", any); admitted {
			t.Error("its credentials are valid afterwards")
		}
		if _, _, admitted := s.Authenticate(id, "c1", any); !admitted {
			t.Error("those of the admitted client are not")
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
		if events := p.Seen(devices.EventPending); len(events) != 1 || string(events[0].Fields) != `"client":"`+s.Client("c1")+`","known":false` {
			t.Errorf("events %+v", events)
		}
		if v := state(t, s); v.State != devices.StatePending || !waits(v, "c1") {
			t.Errorf("%+v", v)
		}
		time.Sleep(admission.CodeLifetime)
		if again := check(t, s, "c1"); again.Code == w.Code {
			t.Error("the code is valid after its lifetime")
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code, ""); err == nil {
			t.Error("an expired code is accepted")
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id), ""); err != nil {
			t.Fatal(err)
		}
		if w := check(t, s, "c1"); !w.Admitted || w.Generation != 0 || !s.IsActivated(id, "c1") || s.IsActivated(id, "c2") {
			t.Errorf("%+v", w)
		}
	})
}

// Approvals create no more members than the limit allows; members are approved as before.
func TestApprovalsKeepTheLimit(t *testing.T) {
	bubble(t, fleet.Config{Approve: true, Members: 1}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		check(t, s, "c1")
		other := devices.ID("02:00:00:00:00:98")
		if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: other, ClientID: "c2"}); err != nil {
			t.Fatal(err)
		}
		if got := approve(t, s, ""); got != "" {
			t.Fatal(got)
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(other), ""); codeOf(err) != devices.CodeLimitReached || !strings.Contains(err.Error(), "--members-limit") {
			t.Errorf("above the limit: %v", err)
		}
		if err := revoke(t, s, id); err != nil {
			t.Fatal(err)
		}
		if got := approve(t, s, ""); got != "" || s.Registry().Members() != 1 {
			t.Errorf("a member: %q, %d members", got, s.Registry().Members())
		}
	})
}

// A client that checks in last under a pending device's id gains nothing by it.
func TestApproveByIDNeedsOneClient(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		owner := check(t, s, "owner")
		check(t, s, "attacker")
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id), ""); err == nil || devices.AsError(err).Code != devices.CodeConflict || !strings.Contains(err.Error(), s.Client("owner")) {
			t.Errorf("approval by id: %v", err)
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, owner.Code, ""); err != nil || !s.IsActivated(id, "owner") || s.IsActivated(id, "attacker") {
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
			if _, err := s.Approve(t.Context(), devicetest.Admin, wrong, ""); devices.AsError(err).Code != devices.CodeDeviceUnknown {
				t.Fatal(err)
			}
		}
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code, ""); err == nil || devices.AsError(err).Code != devices.CodeForbidden {
			t.Errorf("the right code after %d wrong ones: %v", admission.MaxWrongCodes, err)
		}
		time.Sleep(2 * time.Minute)
		if _, err := s.Approve(t.Context(), devicetest.Admin, w.Code, ""); err != nil {
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
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(id), ""); err != nil {
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
		const imported = devices.ID("02:00:00:00:00:98") // without a client, so that a check without Client-Id gets its credentials
		p.Put(devices.Member{ID: imported})
		s = p.Service(t, fleet.Config{})
		if err := s.Forget(t.Context(), devicetest.Admin, imported); err != nil {
			t.Fatal(err)
		}
		if s.Accepts(imported, 0) {
			t.Error("the credentials of a forgotten member without a client are valid")
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
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(admitted), ""); err != nil {
			t.Fatal(err)
		}
		if err := s.Forget(t.Context(), devicetest.Admin, admitted); err != nil {
			t.Fatal(err)
		}
		if x := p.Ledger.Exceptions(); s.Accepts(admitted, 0) || len(x) != 1 {
			t.Errorf("the credentials of a forgotten member are valid: %+v", x)
		}
		revoked := come(4)
		if _, err := s.Approve(t.Context(), devicetest.Admin, string(revoked), ""); err != nil {
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

// approve approves a client by its name and returns the code of the refusal.
func approve(t *testing.T, s *fleet.Service, client string) devices.Code {
	t.Helper()
	_, err := s.Approve(t.Context(), devicetest.Admin, string(id), client)
	return codeOf(err)
}

func codeOf(err error) devices.Code {
	if err == nil {
		return ""
	}
	return devices.AsError(err).Code
}

// A client beside the admitted one is approved by its name alone, and its refusal touches nothing else; it lasts until the
// client is approved, also on a node that starts later.
func TestRefuseClient(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		check(t, s, "c1")
		conn := connect(t, s, "c1", devicetest.NewScript())
		check(t, s, "copy")
		refuse := func(client string) devices.Code {
			return codeOf(s.Refuse(t.Context(), devicetest.Admin, id, client))
		}
		for client, want := range map[string]devices.Code{"copy": devices.CodeBadRequest, "": devices.CodeBadRequest, strings.ToUpper(s.Client("copy")): devices.CodeBadRequest,
			s.Client("unknown"): devices.CodeNotFound, s.Client("c1"): devices.CodeConflict} {
			if got := refuse(client); got != want {
				t.Errorf("refuse %q: %s, want %s", client, got, want)
			}
		}
		if got := codeOf(s.Refuse(t.Context(), devicetest.Admin, "02:00:00:00:00:99", s.Client("copy"))); got != devices.CodeDeviceUnknown {
			t.Errorf("of an unknown device: %s", got)
		}
		// security: D22
		if got := approve(t, s, ""); got != devices.CodeConflict {
			t.Errorf("approved without a name: %q", got)
		}
		for range 2 {
			if got := refuse(s.Client("copy")); got != "" {
				t.Fatal(got)
			}
		}
		synctest.Wait()
		again := p.Service(t, fleet.Config{})
		for _, node := range []*fleet.Service{s, again} {
			// security: D22
			if w := check(t, node, "copy"); !w.Refused || w.Admitted || w.Code != "" || w.Challenge != "" {
				t.Errorf("a refused client: %+v", w)
			}
			if v := state(t, node); v.State == devices.StatePending || !waits(v) {
				t.Errorf("%+v", v)
			}
			if w := check(t, node, "c1"); !w.Admitted || w.Generation != 0 {
				t.Errorf("the admitted client: %+v", w)
			}
			if node.AdmitProven(t.Context(), id, "copy", "serial", true) != admission.RefusedRevoked {
				t.Error("a refused client is admitted by its hardware")
			}
		}
		if _, err := s.Accept(devices.Identity{Device: id, ClientID: "copy"}, idle{}); codeOf(err) != devices.CodeUnauthorized || conn.reason() != "" {
			t.Errorf("a refused client connects: %v; the session ended with %q", err, conn.reason())
		}
		if got := approve(t, s, s.Client("unknown")); got != devices.CodeNotFound {
			t.Errorf("an unknown client: %q", got)
		}
		if got := approve(t, s, s.Client("copy")); got != "" {
			t.Fatal(got)
		}
		if w := check(t, s, "copy"); !w.Admitted || w.Generation != 1 {
			t.Errorf("after its approval: %+v", w)
		}
		if w := check(t, s, "c1"); w.Admitted || w.Code == "" {
			t.Errorf("the replaced client: %+v", w)
		}
	})
}

// A client of a device that was never admitted is refused as well, without making the device known; it stays refused when
// the device is forgotten, and does not join under open admission.
func TestRefuseUnknownDevice(t *testing.T) {
	bubble(t, fleet.Config{Approve: true}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		check(t, s, "stranger")
		check(t, s, "owner")
		if got := approve(t, s, ""); got != devices.CodeConflict {
			t.Errorf("two wait, and one is approved without its name: %q", got)
		}
		if err := s.Refuse(t.Context(), devicetest.Admin, id, s.Client("stranger")); err != nil {
			t.Fatal(err)
		}
		if v := state(t, s); len(p.Devices()) != 0 || !waits(v, "owner") {
			t.Errorf("%d devices; %+v", len(p.Devices()), v)
		}
		if got := approve(t, s, ""); got != "" {
			t.Fatalf("one waits, and its approval needs a name: %s", got)
		}
		if err := s.Forget(t.Context(), devicetest.Admin, id); err != nil {
			t.Fatal(err)
		}
		open := p.Service(t, fleet.Config{})
		if w := check(t, open, "stranger"); !w.Refused || len(p.Devices()) != 0 {
			t.Errorf("it joins: %+v", w)
		}
		if got := approve(t, open, s.Client("stranger")); got != "" {
			t.Fatal(got)
		}
		if w := check(t, open, "stranger"); !w.Admitted {
			t.Errorf("after its approval: %+v", w)
		}
	})
}

// A check changes what is known of a member only if it has the admitted Client-Id, and then only what it reports.
func TestChecksOfMembers(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, p *devicetest.Ports, s *fleet.Service) {
		const imported = devices.ID("02:00:00:00:00:98")
		p.Put(devices.Member{ID: imported})
		said := admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "b", Firmware: "2.4.2", ELF: "e", Chip: "esp32", Language: "de", Serial: "1", ActivateV2: true}}
		for _, c := range []admission.CheckIn{said, {Device: id, ClientID: "c1"}, {Device: id, ClientID: "copy", Facts: devices.Facts{Board: "x", Firmware: "1"}}, {Device: id, Facts: devices.Facts{Board: "x", Firmware: "1"}},
			{Device: imported, Facts: devices.Facts{Board: "x", Firmware: "1"}}} {
			time.Sleep(time.Second)
			if _, err := s.CheckIn(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			all := p.Devices()
			d := all[id]
			// security: D21
			if d.Board != "b" || d.Firmware != "2.4.2" || d.ELF != "e" || d.Chip != "esp32" || d.Language != "de" || d.Serial != "1" || !d.ActivateV2 || all[imported].Board != "" {
				t.Errorf("after %+v: %+v, the imported one %+v", c, d, all[imported])
			}
		}
		said.Firmware, said.ELF = "2.4.3", ""
		if _, err := s.CheckIn(t.Context(), said); err != nil {
			t.Fatal(err)
		}
		if d := p.Devices()[id]; d.Firmware != "2.4.3" || d.ELF != "" {
			t.Errorf("another image without an ELF: %+v", d)
		}
	})
}
