package fleettest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// The database goes away for a while: nobody notices, and nothing is missing
// afterwards.
func TestPostgresOutage(t *testing.T) {
	t.Parallel()
	db := storetest.Postgres(t)
	proxy := storetest.NewProxy(t, db.Address(t))
	proxy.Start()
	node := programs.Start(t, "--database", db.Via(t, proxy.Address()))
	early := programs.Simulate(t, node.Info.OTA, "--devices", "12", "--profile", "fw-2.4,robot", "--seed", "1")
	lateArgs := []string{"--devices", "10", "--mac-base", "02:aa:00:00:00:00", "--seed", "2", "--profile"}
	before := programs.Simulate(t, node.Info.OTA, append(lateArgs, "robot")...)
	node.AwaitReady(t, 22)
	_ = before.Report(t) // they are members, and gone
	node.Await(t, "the rows are there", 20*time.Second, func() bool {
		return db.Count(t, "SELECT count(*) FROM catalog_history") == 22 && db.Count(t, "SELECT count(*) FROM devices") == 22 &&
			db.Count(t, "SELECT count(*) FROM presence WHERE online") == 12
	})

	proxy.Stop()
	call := func(id string) {
		t.Helper()
		r, err := node.Call(t.Context(), id, volume, apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":9}`), Timeout: 5 * time.Second})
		if err != nil || r.IsError {
			t.Errorf("%s during the outage: %+v, %v", id, r, err)
		}
	}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() { call(fmt.Sprintf("02:f1:ee:00:00:%02x", i)) })
	}
	wg.Wait()
	late := programs.Simulate(t, node.Info.OTA, append(lateArgs, "fw-2.1")...)
	devicetest.Eventually(t, "members connect during the outage", func() bool {
		for i := range 10 {
			d, err := node.Device(t.Context(), fmt.Sprintf("02:aa:00:00:00:%02x", i))
			if err != nil || d.MCP.CatalogState != "ready" {
				return false
			}
		}
		return true
	})
	call("02:aa:00:00:00:03")
	if _, err := node.Call(t.Context(), "02:bb:00:00:00:00", volume, apiclient.CallRequest{}); problemCode(err) != "device_unknown" {
		t.Errorf("an unknown device, database away: %v", err)
	}
	gone := early.Report(t) // the early devices leave while the database is away
	proxy.Start()

	node.Await(t, "rows and history are complete", 30*time.Second, func() bool {
		return db.Count(t, "SELECT count(*) FROM catalog_history") == 32 && db.Count(t, "SELECT count(*) FROM devices") == 22 &&
			db.Count(t, "SELECT count(*) FROM presence WHERE online") == 10
	})
	for _, d := range append(gone.Devices, late.Report(t).Devices...) {
		var hash, firmware string
		row := db.Raw.QueryRow("SELECT catalog, firmware FROM catalog_history WHERE device = $1 AND catalog = $2", d.ID, d.CatalogSHA256)
		if err := row.Scan(&hash, &firmware); err != nil || hash != d.CatalogSHA256 || firmware != d.Firmware {
			t.Errorf("%s: history has %s %s, %v; the device has %s %s", d.ID, hash, firmware, err, d.CatalogSHA256, d.Firmware)
		}
	}
}

// A node that starts while its database is away serves what it noted.
func TestDegradedStart(t *testing.T) {
	t.Parallel()
	db := storetest.Postgres(t)
	proxy := storetest.NewProxy(t, db.Address(t))
	proxy.Start()
	node := programs.Start(t, "--database", db.Via(t, proxy.Address()))
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "3", "--profile", "fw-2.4", "--reconnect", "300ms")
	node.AwaitReady(t, 3)
	node.Stop(t)
	proxy.Stop()
	node.Run(t)
	devicetest.Eventually(t, "the fleet is back without the database", func() bool {
		d, err := node.Device(t.Context(), "02:f1:ee:00:00:02")
		return err == nil && d.MCP.CatalogState == "ready"
	})
	proxy.Start()
	node.AwaitReady(t, 3)
	if r := sim.Report(t); r.Totals.Crashes != 0 {
		t.Errorf("%+v", r.Totals)
	}
}

// natsServer is the external server that tests share; each uses a prefix of
// its own and removes its streams.
func natsServer(t *testing.T) (url, prefix string, js jetstream.JetStream, nc *nats.Conn) {
	t.Helper()
	url = os.Getenv("FLEETD_TEST_NATS")
	if url == "" {
		url = nats.DefaultURL
	}
	nc, err := nats.Connect(url)
	if err != nil {
		t.Skipf("%sno NATS at %s (FLEETD_TEST_NATS): %v", storetest.NotRun, url, err)
	}
	t.Cleanup(nc.Close)
	if js, err = jetstream.New(nc); err != nil {
		t.Fatal(err)
	}
	var b [4]byte
	rand.Read(b[:])
	prefix = "fleettest_" + hex.EncodeToString(b[:]) + ".v1"
	t.Cleanup(func() { removeStreams(t, js, strings.ToUpper(strings.ReplaceAll(prefix, ".", "_"))) })
	return url, prefix, js, nc
}

func removeStreams(t *testing.T, js jetstream.JetStream, mark string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // the test's own has ended
	defer cancel()
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		if strings.Contains(name, mark) {
			if err := js.DeleteStream(ctx, name); err != nil {
				t.Errorf("stream %s remains: %v", name, err)
			}
		}
	}
	if err := names.Err(); err != nil {
		t.Errorf("streams may remains: %v", err)
	}
}

// Every documented event, seen by a watcher on an external server, and kept
// once in the stream.
func TestExternalNATS(t *testing.T) {
	t.Parallel()
	url, prefix, js, nc := natsServer(t)
	watcher, err := nc.SubscribeSync(prefix + ".devices.>")
	if err != nil {
		t.Fatal(err)
	}
	node := programs.Start(t, "--nats", url, "--nats-prefix", prefix, "--photo-limit", "64MiB", "--event-limit", "64MiB", "--notification-limit", "64MiB")
	// The other tests create and delete streams on this server: if it is late, what the first devices do would not be stored.
	node.Await(t, "the streams are there", 20*time.Second, func() bool {
		status, _ := get(t, node.Info.API+"/readyz", nil)
		return status == http.StatusOK
	})
	sim := programs.Simulate(t, node.Info.OTA, "--devices", "2", "--profile", "fw-2.4", "--notify", "1s")
	node.AwaitReady(t, 2)
	const id = "02:f1:ee:00:00:00"
	if r, err := node.Call(t.Context(), id, "self.camera.take_photo", apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"q"}`)}); err != nil || r.IsError {
		t.Fatalf("photo: %+v, %v", r, err)
	}
	begun := time.Now()
	if _, err := node.Call(t.Context(), "02:00:00:00:00:99", volume, apiclient.CallRequest{}); problemCode(err) != "device_unknown" || time.Since(begun) > 2*time.Second {
		t.Errorf("an absent device, with a watcher attached: %v after %v", err, time.Since(begun))
	}
	token, err := os.ReadFile(node.Dir + "/admin-token")
	if err != nil {
		t.Fatal(err)
	}
	answer, err := nc.RequestMsg(&nats.Msg{Subject: prefix + ".cmd.02f1ee000000.call", Header: nats.Header{"Fleetd-Token": {strings.TrimSpace(string(token))}},
		Data: []byte(`{"tool":"self.get_device_status","arguments":{}}`)}, 5*time.Second)
	if err != nil || !strings.Contains(string(answer.Data), `"isError":false`) {
		t.Errorf("a service's call: %s, %v", answer.Data, err)
	}
	node.Await(t, "a notification came", 10*time.Second, func() bool {
		n, _, _ := watcher.Pending()
		return n >= 8
	})
	sim.Report(t)
	wanted := map[string]string{"online": "client", "catalog": "added", "photo": "photo", "offline": "reason", "notifications": "method"}
	deadline := time.Now().Add(15 * time.Second)
	for len(wanted) > 0 && time.Now().Before(deadline) {
		msg, err := watcher.NextMsg(time.Second)
		if err != nil {
			continue
		}
		rest := strings.TrimPrefix(msg.Subject, prefix+".devices.02f1ee000000.")
		kind, _, _ := strings.Cut(rest, ".")
		member, waited := wanted[kind]
		if !waited {
			continue
		}
		var payload map[string]json.RawMessage
		if err := json.Unmarshal(msg.Data, &payload); err != nil {
			t.Fatalf("%s: %v", msg.Data, err)
		}
		for _, name := range []string{"device", "node", "session", "epoch", "seq", "time", member} {
			if _, ok := payload[name]; !ok {
				t.Errorf("%s event without %q: %s", kind, name, msg.Data)
			}
		}
		delete(wanted, kind)
	}
	if len(wanted) > 0 {
		t.Errorf("never seen: %v", wanted)
	}
	stream, err := js.Stream(t.Context(), strings.ToUpper(strings.ReplaceAll(prefix, ".", "_"))+"_EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	devicetest.Eventually(t, "the stream has each once", func() bool {
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(prefix+".devices.>"))
		if err != nil {
			return false
		}
		s := info.State.Subjects
		p := prefix + ".devices.02f1ee000000."
		return s[p+"online"] == 1 && s[p+"offline"] == 1 && s[p+"catalog"] == 1 && s[p+"photo"] == 1
	})
}
