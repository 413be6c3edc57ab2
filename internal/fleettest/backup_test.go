package fleettest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
	"fleetd/internal/racetest"
)

// facts are what a restored node must know of a device.
type facts struct {
	Name, Client, Catalog, Firmware string
	Labels                          map[string]string
	History                         []string
}

func (n *Node) facts(t *testing.T) map[string]facts {
	t.Helper()
	all := map[string]facts{}
	for _, d := range n.List(t) {
		f := facts{Name: d.Name, Client: d.ClientID, Catalog: d.MCP.Catalog, Firmware: d.Firmware, Labels: d.Labels}
		for entry, err := range apiclient.List[json.RawMessage](t.Context(), n.Client, nil, "devices", d.ID, "catalogs") {
			if err != nil {
				t.Fatal(err)
			}
			f.History = append(f.History, string(entry))
		}
		all[d.ID] = f
	}
	return all
}

// A node is backed up while its devices are connected and called, its backup
// is restored elsewhere, and the devices come back to that with the
// credentials they have. They are MQTT devices, which ask the OTA address at
// their start and never again.
func TestBackupOfARunningNode(t *testing.T) {
	t.Parallel()
	fleet, others := racetest.Size(20, 8), racetest.Size(60, 30)
	node := programs.Start(t)
	sim := programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", fmt.Sprint(fleet), "--profile", "fw-2.1,fw-2.4,robot", "--seed", "11", "--reconnect", "300ms")
	node.AwaitReady(t, fleet)
	for i, d := range node.List(t) {
		name, labels := fmt.Sprintf("lamp %d", i), map[string]*string{"room": new(fmt.Sprint(i))}
		if _, err := node.Patch(t.Context(), d.ID, api.DeviceEdit{Name: &name, Labels: labels}, 0); err != nil {
			t.Fatal(err)
		}
	}
	node.AwaitStored(t)
	before := node.facts(t)

	calling, stop := context.WithCancel(t.Context())
	var calls sync.WaitGroup
	for id := range maps.Keys(before) {
		calls.Go(func() {
			for calling.Err() == nil {
				r, err := node.Call(calling, id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":3}`)})
				if calling.Err() == nil && (err != nil || r.IsError) {
					t.Errorf("%s during the backup: %+v, %v", id, r, err)
				}
			}
		})
	}
	// More devices come while it is copied, so that it is being written.
	more := programs.Simulate(t, node.Info.OTA, "--transport", "websocket", "--devices", fmt.Sprint(others), "--ramp", "30", "--profile", "fw-2.4", "--mac-base", "02:cc:00:00:00:00", "--seed", "12")
	out := t.TempDir()
	for copies := range 3 {
		node.Await(t, "more devices came", 20*time.Second, func() bool { return node.Metric(t, "fleetd_devices") > float64(fleet+5*copies) })
		stdout, stderr, status := node.Command(t, "backup", "-o", filepath.Join(out, "b.tar.gz"))
		if status != 0 || !strings.Contains(stdout, "Backup of running node") || !strings.Contains(stdout, "Events and photos (nats/) are not in it") {
			t.Fatalf("status %d\n%s%s", status, stdout, stderr)
		}
	}
	stop()
	calls.Wait()
	_ = more.Report(t) // ends them
	token, err := os.ReadFile(filepath.Join(node.Dir, "admin-token"))
	if err != nil {
		t.Fatal(err)
	}
	node.Stop(t)
	sim.Freeze(t) // so that the restored node shows what is stored, and not what devices announce anew

	restored := &Node{Dir: filepath.Join(t.TempDir(), "restored"), Info: node.Info, programs: programs, args: node.args}
	if stdout, stderr, status := restored.Command(t, "restore", filepath.Join(out, "b.tar.gz")); status != 0 || !strings.Contains(stdout, "fleetd serve --data-dir "+restored.Dir) {
		t.Fatalf("status %d\n%s%s", status, stdout, stderr)
	}
	if again, err := os.ReadFile(filepath.Join(restored.Dir, "admin-token")); err != nil || string(again) != string(token) {
		t.Errorf("the token is another: %v", err)
	}
	if _, stderr, status := restored.Command(t, "restore", filepath.Join(out, "b.tar.gz")); status != 1 || !strings.Contains(stderr, "is not empty") {
		t.Errorf("restored twice: status %d, %s", status, stderr)
	}
	restored.Run(t)
	t.Cleanup(func() { restored.Stop(t) })
	after := restored.facts(t)
	for id, want := range before {
		if got, ok := after[id]; !ok || got.Name != want.Name || got.Client != want.Client || got.Catalog != want.Catalog || got.Firmware != want.Firmware ||
			!maps.Equal(got.Labels, want.Labels) || !slices.Equal(got.History, want.History) {
			t.Errorf("%s: restored %+v, was %+v", id, got, want)
		}
		if _, err := apiclient.Get[api.StoredCatalog](t.Context(), restored.Client, nil, "catalogs", want.Catalog); err != nil {
			t.Errorf("%s: its catalog: %v", id, err)
		}
	}
	sim.Thaw(t)
	restored.AwaitReady(t, fleet)
	for id := range before {
		if r, err := restored.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":4}`)}); err != nil || r.IsError {
			t.Errorf("%s after the restore: %+v, %v", id, r, err)
		}
	}
	if refused := restored.Metric(t, "fleetd_mqtt_connects_total", `code="4"`) + restored.Metric(t, "fleetd_mqtt_connects_total", `code="5"`); refused != 0 {
		t.Errorf("%v connections were refused for their credentials", refused)
	}
	if checks := restored.Metric(t, "fleetd_ota_checks_total"); checks != 0 {
		t.Errorf("%v OTA checks: the devices did not come with what they had", checks)
	}
	_ = sim.Report(t)
}
