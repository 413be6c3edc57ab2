package fleettest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"fleetd/internal/apiclient"
	"fleetd/internal/devicetest"
	"fleetd/internal/natstest"
	"fleetd/internal/store/storetest"
)

// deployedUsers runs a NATS server with the users of deploy/nats, each of whom
// has its name as password.
func deployedUsers(t *testing.T) *server.Server {
	t.Helper()
	users, err := filepath.Abs("../../deploy/nats")
	if err != nil {
		t.Fatal(err)
	}
	// An include is looked for beside the file that has it, and has to be relative.
	dir := t.TempDir()
	for _, name := range []string{"users.conf", "nats.conf"} {
		content, err := os.ReadFile(filepath.Join(users, name))
		for _, user := range []string{"node", "voice", "explainer", "watcher"} {
			// A parallel test cannot set the variables of the environment that the file names.
			content = bytes.ReplaceAll(content, []byte("$NATS_"+strings.ToUpper(user)+"_PASSWORD"), []byte(user))
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "server.conf")
	text := fmt.Sprintf("listen: \"127.0.0.1:-1\"\njetstream: { store_dir: %q }\ninclude ./nats.conf\ninclude ./users.conf\n", t.TempDir())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	options, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return natstest.Start(t, *options)
}

// With the users of deploy/nats, nodes and programs can do all they have to,
// and no program receives what is not for it.
func TestNATSUsers(t *testing.T) {
	t.Parallel()
	bus := deployedUsers(t)
	connect := func(user string, options ...nats.Option) *nats.Conn {
		t.Helper()
		nc, err := nats.Connect("nats://"+bus.Addr().String(), append(options, nats.UserInfo(user, user), nats.PermissionErrOnSubscribe(true), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	voice, explainer, watcher := connect("voice", nats.CustomInboxPrefix("_INBOX.voice")), connect("explainer"), connect("watcher")
	hear := func(nc *nats.Conn, subject string) *nats.Subscription {
		t.Helper()
		s, err := nc.SubscribeSync(subject)
		if err == nil {
			err = nc.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if _, err := explainer.Subscribe("fleetd.v1.vision.explain", func(m *nats.Msg) {
		_ = m.Respond([]byte(`{"text":"a cat"}`)) // the photo's call shows it
	}); err != nil {
		t.Fatal(err)
	}
	watched, spoken := hear(watcher, "fleetd.v1.devices.>"), hear(voice, "fleetd.v1.devices.>")

	db := storetest.Postgres(t)
	var nodes []*Node
	for _, name := range []string{"a", "b"} {
		nodes = append(nodes, programs.Start(t, "--nats", "nats://node:node@"+bus.Addr().String(), "--database", db.URL, "--secret", "one fleet, one secret", "--node", name,
			"--photo-limit", "64MiB", "--event-limit", "64MiB", "--notification-limit", "64MiB"))
	}
	programs.Simulate(t, nodes[0].Info.OTA, "--devices", "1", "--profile", "fw-2.4")
	nodes[0].AwaitReady(t, 1)
	const id = "02:f1:ee:00:00:00"
	photo, err := nodes[1].Call(t.Context(), id, "self.camera.take_photo", apiclient.CallRequest{Arguments: json.RawMessage(`{"question":"what is this?"}`)})
	if err != nil || photo.IsError || !strings.Contains(fmt.Sprint(photo.Content), "a cat") {
		t.Errorf("a photo through the other node: %v, %v", photo.Content, err)
	}
	token := nats.Header{"Fleetd-Token": {nodes[0].Token(t)}}
	answer, err := voice.RequestMsg(&nats.Msg{Subject: "fleetd.v1.cmd.02f1ee000000.call", Header: token, Data: []byte(`{"tool":"self.get_device_status"}`)}, 5*time.Second)
	if err != nil || !strings.Contains(string(answer.Data), `"isError":false`) {
		t.Errorf("a service's call: %v, %v", answer, err)
	}
	for name, s := range map[string]*nats.Subscription{"watcher": watched, "voice": spoken} {
		devicetest.Eventually(t, name+" receives the device", func() bool {
			m, err := s.NextMsg(5 * time.Second)
			return err == nil && strings.HasSuffix(m.Subject, ".photo")
		})
	}
	for _, n := range nodes {
		if n.Metric(t, "fleetd_events_dropped_total") != 0 || n.Metric(t, "fleetd_nats_connected") != 1 || strings.Contains(n.Log.String(), "ermissions") {
			t.Errorf("node %s misses something", n.Info.API)
		}
	}
	for name, nc := range map[string]*nats.Conn{"voice": voice, "explainer": explainer, "watcher": watcher} {
		subjects := []string{"fleetd.v1.cmd.*.call", "fleetd.v1.cmd.>", "_INBOX.>", "fleetd.v1.news.*", "$JS.>", ">"}
		switch name {
		case "explainer":
			subjects = append(subjects, "fleetd.v1.devices.>")
		case "voice":
			subjects = append(subjects, "fleetd.v1.jobs.*.task", "fleetd.v1.jobs.>")
		}
		for _, subject := range subjects {
			// security: N5
			if _, err := hear(nc, subject).NextMsg(time.Second); !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s listens to %s: %v", name, subject, err)
			}
		}
	}
	node := connect("node")
	forged := hear(node, "fleetd.v1.>")
	for _, nc := range []*nats.Conn{voice, explainer, watcher} {
		for _, subject := range []string{"fleetd.v1.devices.02f1ee000000.online", "fleetd.v1.news.a", "fleetd.v1.claims.a", "fleetd.v1.cmd.02f1ee000000.rpc"} {
			if err := errors.Join(nc.Publish(subject, []byte("forged")), nc.Flush()); err != nil {
				t.Fatal(err)
			}
		}
	}
	// What was let through has been sent here before what comes now.
	if err := node.Publish("fleetd.v1.devices.02f1ee000000.end", nil); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := forged.NextMsg(10 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(m.Subject, ".end") {
			return
		}
		// security: N5
		if string(m.Data) == "forged" {
			t.Errorf("%s is forged", m.Subject)
		}
	}
}
