package fleettest

import (
	"encoding/json"
	"errors"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"fleetd/internal/api"
	"fleetd/internal/devicetest"
)

// A service logs in to the embedded NATS with an API key, gets what its scopes open and
// no more, and is let go when the key ends.
func TestNATSLoginByKey(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, natsFlag, "0.0.0.0:0")
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--profile", "fw-2.4", "--devices", "1")
	node.AwaitReady(t, 1)
	at, err := url.Parse(node.Info.NATS)
	if err != nil {
		t.Fatal(err)
	}
	connect := func(token, inbox string, options ...nats.Option) (*nats.Conn, error) {
		nc, err := nats.Connect("nats://127.0.0.1:"+at.Port(), append(options, nats.Token(token), nats.CustomInboxPrefix(inbox), nats.MaxReconnects(0))...)
		if err == nil {
			t.Cleanup(nc.Close)
		}
		return nc, err
	}
	create := func(params api.NewKey) api.CreatedKey {
		k, err := node.CreateKey(t.Context(), params)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	limited := create(api.NewKey{Name: "limited", Scopes: []string{"events:read"}, Devices: api.Selection{Text: "room=lab"}})
	// security: N9
	for name, token := range map[string]string{"nobody": "", "a wrong token": "x", "a key for some devices": limited.Token} {
		if _, err := connect(token, "_INBOX"); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := connect(node.Token(t), "_INBOX"); err != nil {
		t.Errorf("the admin token: %v", err)
	}
	key := create(api.NewKey{Name: "agent", Scopes: []string{"events:read", "tools:call"}, Tools: []string{volume}})
	refused := make(chan error, 10)
	closed := make(chan struct{})
	nc, err := connect(key.Token, "_INBOX."+key.ID, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err }), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
	if err != nil {
		t.Fatal(err)
	}
	device := token(node.List(t)[0].ID)
	reply, err := nc.RequestMsg(&nats.Msg{Subject: "fleetd.v1.cmd." + device + ".call", Header: nats.Header{"Fleetd-Token": {key.Token}},
		Data: []byte(`{"tool":"` + volume + `","arguments":{"volume":7}}`)}, 20*time.Second)
	if err != nil || !json.Valid(reply.Data) {
		t.Fatalf("a call: %v", err)
	}
	if _, err := nc.SubscribeSync("fleetd.v1.devices.*.online"); err != nil {
		t.Fatal(err)
	}
	for _, subject := range []string{"fleetd.v1.cmd.>", "$JS.>", "_INBOX.>", "fleetd.v1.devices." + device + ".audio", "fleetd.v1.devices." + device + ".photo", "fleetd.v1.jobs.*.task", "fleetd.v1.jobs.>"} {
		if _, err := nc.SubscribeSync(subject); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-refused: // security: N9
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s: %v", subject, err)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s can be subscribed to", subject)
		}
	}
	if _, err := node.RevokeKey(t.Context(), key.ID); err != nil {
		t.Fatal(err)
	}
	select {
	case <-closed: // security: N9
	case <-time.After(30 * time.Second):
		t.Error("the connection outlives its key")
	}
}

// A key holds a bounded part of the embedded NATS: connections, and subscriptions of each.
func TestNATSIsBounded(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, natsFlag, "0.0.0.0:0")
	at, err := url.Parse(node.Info.NATS)
	if err != nil {
		t.Fatal(err)
	}
	key, err := node.CreateKey(t.Context(), api.NewKey{Name: "agent", Scopes: []string{"events:read"}})
	if err != nil {
		t.Fatal(err)
	}
	connect := func(token string, options ...nats.Option) (*nats.Conn, error) {
		nc, err := nats.Connect("nats://127.0.0.1:"+at.Port(), append(options, nats.Token(token), nats.CustomInboxPrefix("_INBOX."+key.ID), nats.MaxReconnects(0))...)
		if err == nil {
			t.Cleanup(nc.Close)
		}
		return nc, err
	}
	const connections, subscriptions = 16, 5_000
	failed := make(chan error, 1)
	first, err := connect(key.Token, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		select {
		case failed <- err:
		default: // one is enough
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	for range connections - 1 {
		if _, err := connect(key.Token); err != nil {
			t.Fatal(err)
		}
	}
	// security: N44
	if _, err := connect(key.Token); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("one connection more: %v", err)
	}
	if _, err := connect(node.Token(t)); err != nil {
		t.Errorf("the admin: %v", err)
	}
	for i := range subscriptions + 1 {
		if _, err := first.Subscribe("fleetd.v1.devices."+strconv.Itoa(i)+".online", func(*nats.Msg) {}); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-failed: // security: N44
		if !strings.Contains(err.Error(), "maximum subscriptions exceeded") {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("a connection has any number of subscriptions")
	}
	first.Close()
	devicetest.Eventually(t, "the place of a connection that was closed is free", func() bool {
		_, err := connect(key.Token)
		return err == nil
	})
}
