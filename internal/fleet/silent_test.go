package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
	"fleetd/internal/fleet"
)

// Members that never answer tools/list delay another device by seconds only.
func TestSilentMembersDelayNoOthers(t *testing.T) {
	bubble(t, fleet.Config{Handshakes: 256}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		silent := devicetest.NewScript()
		silent.Other = func(r devicetest.Request) string {
			if r.Method == "tools/list" {
				return "silent"
			}
			return ""
		}
		for i := range 2500 {
			p := &pipe{script: silent}
			session, err := s.Accept(devices.Identity{Device: devices.ID(fmt.Sprintf("02:00:00:01:%02x:%02x", i>>8, i&255)), ClientID: "c", Transport: devices.TransportMQTT}, p)
			if err != nil {
				t.Fatal(err)
			}
			p.session = session
			session.StartMCP(devices.FeaturesMCP)
		}
		connect(t, s, "c1", devicetest.NewScript())
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if v := state(t, s); v.Presence.MCP != devices.MCPReady {
			t.Errorf("after 5 s the new device's tools are %s", v.Presence.MCP)
		}
	})
}

// slowHolder is a router to a node that holds every device and answers slowly.
type slowHolder struct{ *devicetest.Ports }

func (slowHolder) Query(ctx context.Context, _ devices.ID, _ devices.Query) ([]byte, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A device whose node answers slowly is online if its row is. Without the database its
// state is unknown, not offline.
func TestSlowHolderIsOnline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.ServiceOver(t, fleet.Config{Node: "b", IsNodeAlive: func(string) bool { return true }}, func(p *fleet.Ports) { p.Router = slowHolder{ports} })
		if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"}); err != nil {
			t.Fatal(err)
		}
		ports.SavePresence(devices.Presence{Device: id, Epoch: 1, Seq: 1, Online: true, Node: "a"})
		v, err := s.Get(t.Context(), id)
		if err != nil || v.State != devices.StateOnline || v.Presence.Node != "a" {
			t.Errorf("%s on %q, %v", v.State, v.Presence.Node, err)
		}
		ports.SavePresence(devices.Presence{Device: id, Epoch: 1, Seq: 2, Node: "a"}) // NATS may not answer either
		if v, err := s.Get(t.Context(), id); err != nil || v.State != devices.StateOffline {
			t.Errorf("with an offline row: %s, %v", v.State, err)
		}
		ports.SetAway(true)
		if v, err := s.Get(t.Context(), id); err == nil || devices.AsError(err).Code != devices.CodeUnavailable {
			t.Errorf("without the database: %s, %v", v.State, err)
		}
	})
}

// A node that has not read its members refuses decisions as unavailable.
func TestDecisionsBeforeTheMembersAreRead(t *testing.T) {
	ports := devicetest.New()
	ports.Put(devices.Member{ID: id, ClientID: "c"})
	s := ports.Unread(t, fleet.Config{})
	name := "lamp"
	_, approved := s.Approve(t.Context(), devicetest.Admin, string(id), "")
	_, revoked := s.Revoke(t.Context(), devicetest.Admin, id)
	_, checked := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c"})
	_, recognized := s.Recognize(t.Context(), id, "c")
	_, got := s.Get(t.Context(), id)
	for what, err := range map[string]error{"revoke": revoked, "forget": s.Forget(t.Context(), devicetest.Admin, id), "edit": s.Edit(t.Context(), devicetest.Admin, id, 0, fleet.Edit{Name: &name}),
		"approve": approved, "rotate": s.Rotate(t.Context(), devicetest.Admin, id, time.Hour), "check": checked, "recognize": recognized, "get": got} {
		if err == nil || devices.AsError(err).Code != devices.CodeUnavailable || devices.AsError(err).Part != "database" {
			t.Errorf("%s: %v", what, err)
		}
	}
	if !s.IsKnown(id) || s.IsMember(id) || !s.MayBeMember(id) {
		t.Error("the members are not read yet")
	}
	ports.Back(t, s)
	if w := check(t, s, "c"); !w.Admitted {
		t.Errorf("when they are read: %+v", w)
	}
}

// A raw request that waits for its turn is not sent if its key is revoked meanwhile.
func TestKeyEndsWhileItsRequestWaits(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, _ *devicetest.Ports, s *fleet.Service) {
		release := make(chan struct{})
		script := devicetest.NewScript()
		script.Call = func(string, json.RawMessage) string { <-release; return devicetest.True }
		connect(t, s, "c1", script)
		ready(t, s)
		scopes, _ := access.ParseScopes([]string{"tools:call:user", "tools:call"})
		k, _, err := s.CreateKey(t.Context(), devicetest.Admin, fleet.NewKeyParams{Name: "short", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		who, _ := s.Keys().Caller(k.ID)
		first, second := make(chan *devices.Error, 1), make(chan error, 1)
		go func() { first <- shortCall(t, s, 20*time.Second) }()
		synctest.Wait()
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := s.CallRPC(ctx, devices.RPCCall{Principal: access.Principal{Caller: who, Via: access.ViaREST}, Device: id, Method: "resources/list"})
			second <- err
		}()
		synctest.Wait()
		if _, _, err := s.RevokeKey(t.Context(), devicetest.Admin, "short"); err != nil {
			t.Fatal(err)
		}
		close(release)
		if err := <-first; err != nil {
			t.Error(err)
		}
		if err := <-second; err == nil || devices.AsError(err).Code != devices.CodeUnauthorized {
			t.Errorf("the waiting request: %v", err)
		}
		for _, r := range script.Received() {
			if r.Method == "resources/list" {
				t.Error("the device received it")
			}
		}
	})
}

// The firmware version that a device reports when it connects is newer than an earlier
// OTA check, on whichever node that was.
func TestFirmwareOfInitializeHolds(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, ports *devicetest.Ports, s *fleet.Service) {
		if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "box", Firmware: "2.3.0", ELF: "e"}}); err != nil {
			t.Fatal(err)
		}
		checked := devices.Check{Device: id, Facts: devices.Facts{Board: "box", Firmware: "2.3.0", ELF: "e", CheckedAt: state(t, s).Device.CheckedAt}}
		time.Sleep(time.Minute)
		script := devicetest.NewScript()
		script.Firmware = "2.4.2"
		connect(t, s, "c1", script)
		ready(t, s)
		ports.SaveFacts(checked)
		if d := state(t, s).Device; d.Firmware != "2.4.2" || d.ELF != "" || d.Board != "box" {
			t.Errorf("in memory it has %q, %s %s", d.Board, d.Firmware, d.ELF)
		}
		if d, _, _, _ := ports.Of(id); d.Firmware != "2.4.2" || d.ELF != "" || d.Board != "box" {
			t.Errorf("in the database it has %q, %s %s", d.Board, d.Firmware, d.ELF)
		}
	})
}

// A newer check on another node keeps all its values when the device connects to a node
// that missed it.
func TestNewerCheckElsewhereHolds(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, ports *devicetest.Ports, a *fleet.Service) {
		first := admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "box", Firmware: "2.3.0", ELF: "e-old", Language: "zh-CN", Chip: "esp32s3"}}
		if _, err := a.CheckIn(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		second := first
		second.Firmware, second.ELF, second.Language = "2.4.2", "e-new", "de-DE"
		if _, err := ports.Service(t, fleet.Config{Node: "b"}).CheckIn(t.Context(), second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		script := devicetest.NewScript()
		script.Firmware = "2.4.2"
		connect(t, a, "c1", script)
		ready(t, a)
		if d, _, _, _ := ports.Of(id); d.ELF != "e-new" || d.Language != "de-DE" {
			t.Errorf("the row has ELF %q, language %q", d.ELF, d.Language)
		}
	})
}

// What a device reports here is newer than what another node stored, even if the clock of that node is ahead.
func TestCheckAfterOneOfAWrongClock(t *testing.T) {
	bubble(t, fleet.Config{}, func(t *testing.T, ports *devicetest.Ports, s *fleet.Service) {
		first := admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "box", Firmware: "2.3.0", ELF: "e-old"}}
		if _, err := s.CheckIn(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		ports.SaveFacts(devices.Check{Device: id, Facts: devices.Facts{Board: "box", Firmware: "2.3.0", ELF: "e-old", CheckedAt: time.Now().Add(10 * time.Minute)}}) // by the other node
		script := devicetest.NewScript()
		script.Firmware = "2.3.0"
		connect(t, s, "c1", script)
		ready(t, s)
		second := first
		second.Firmware, second.ELF = "2.4.2", "e-new"
		if _, err := s.CheckIn(t.Context(), second); err != nil {
			t.Fatal(err)
		}
		if d := state(t, s).Device; d.Firmware != "2.4.2" || d.ELF != "e-new" {
			t.Errorf("in memory it has %s %s", d.Firmware, d.ELF)
		}
		if d, _, _, _ := ports.Of(id); d.Firmware != "2.4.2" || d.ELF != "e-new" {
			t.Errorf("in the database it has %s %s", d.Firmware, d.ELF)
		}
	})
}

// late has rows without what was checked a moment ago, as while the writer is busy.
type late struct{ *devicetest.Ports }

// SaveFacts implements fleet.Records.
func (late) SaveFacts(devices.Check) {}

// A device checks in at one node and connects to another, before the first has written what it said: the other has it as soon as it reads
// the row again.
func TestFactsThatAnotherNodeWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		ports.Put(devices.Member{ID: id, ClientID: "c1"})
		s := ports.Service(t, fleet.Config{})
		defer s.Close()
		script := devicetest.NewScript()
		script.Firmware = "2.4.2"
		connect(t, s, "c1", script)
		ready(t, s)
		ports.SaveFacts(devices.Check{Device: id, Facts: devices.Facts{Board: "box", Firmware: "2.4.2", ELF: "e", Chip: "esp32s3", CheckedAt: time.Now()}})
		views, err := s.Views(t.Context(), []devices.ID{id})
		if err != nil || len(views) != 1 {
			t.Fatal(err)
		}
		if d := views[0].Device; d.ELF != "e" || d.Chip != "esp32s3" || d.Firmware != "2.4.2" {
			t.Errorf("%+v", d.Facts)
		}
	})
}

// A device that connects before the facts of its check are written has them all the same: jobs select by them, and checks of images
// compare them.
func TestFactsThatAreNotWrittenYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Records = late{ports} })
		defer s.Close()
		if _, err := s.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "c1", Facts: devices.Facts{Board: "box", Firmware: "2.4.2", ELF: "e", Chip: "esp32s3"}}); err != nil {
			t.Fatal(err)
		}
		script := devicetest.NewScript()
		script.Firmware = "2.4.2"
		connect(t, s, "c1", script)
		ready(t, s)
		if d := state(t, s).Device; d.ELF != "e" || d.Chip != "esp32s3" || d.Board != "box" {
			t.Errorf("in memory it has %q, %q, %q", d.Board, d.ELF, d.Chip)
		}
	})
}
