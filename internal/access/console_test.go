package access

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

// registry returns a registry with a key, and its caller.
func registry(t *testing.T, scopes, devices string, tools ...string) (*Registry, Key, *Caller) {
	t.Helper()
	r := NewRegistry()
	k, token := key(t, scopes, devices, tools...)
	put(t, r, k)
	who, err := r.Authenticate(token, now)
	if err != nil {
		t.Fatal(err)
	}
	return r, k, who
}

func put(t *testing.T, r *Registry, k Key) {
	t.Helper()
	if _, err := r.Put(k, now); err != nil {
		t.Fatal(err)
	}
}

// issue makes a console key and puts it into the registry.
func issue(t *testing.T, r *Registry, who *Caller, scopes Scopes) (Key, string) {
	t.Helper()
	k, err := r.ConsoleKey(who, scopes, now)
	if err != nil {
		t.Fatal(err)
	}
	document, _ := json.Marshal(k) // as the store keeps it
	k = Key{}
	if err := json.Unmarshal(document, &k); err != nil {
		t.Fatal(err)
	}
	k, token, err := r.Issue(k, now)
	if err != nil {
		t.Fatal(err)
	}
	put(t, r, k)
	r.Issued(k)
	return k, token
}

// A console key acts in the name of its parent, within its limits.
func TestConsoleKeyIsItsParent(t *testing.T) {
	r, parent, who := registry(t, "devices:read tools:call", "room=lab", "*get*")
	k, token := issue(t, r, who, 0)
	child, err := r.Authenticate(token, now)
	if err != nil {
		t.Fatal(err)
	}
	// security: K19
	if child.Key != parent.ID || child.Name != parent.Name || child.Through != k.ID || child.Scopes != who.Scopes || child.Devices.String() != who.Devices.String() || !reflect.DeepEqual(child.Tools, who.Tools) {
		t.Errorf("%+v", child)
	}
	if k.Name != "console "+k.ID || !k.Expires.Equal(parent.Expires) {
		t.Errorf("%+v", k)
	}
	narrow := mustScopes(ScopeRead)
	if _, token := issue(t, r, who, narrow); true {
		if c, err := r.Authenticate(token, now); err != nil || c.Scopes != narrow {
			t.Errorf("narrower: %+v, %v", c, err)
		}
	}
	// security: K19
	if _, err := r.ConsoleKey(who, mustScopes(ScopeRead, ScopeWrite), now); err == nil || !strings.Contains(err.Error(), "devices:write") {
		t.Errorf("a wider one: %v", err)
	}
	// security: K19
	if _, err := r.ConsoleKey(child, 0, now); err == nil {
		t.Error("a console key made another one")
	}
	if _, err := r.ConsoleKey(Open, 0, now); err == nil {
		t.Error("a key where none is required")
	}
	var reader Reader
	line := AppendPrincipal(nil, Principal{Caller: child, Via: ViaREST})
	if there := reader.Parse(string(line)); there.Caller.Through != k.ID || there.Key() != parent.ID {
		t.Errorf("on another node: %s", line)
	}
}

// A console key ends after 12 hours, and with its parent.
func TestConsoleKeyEnds(t *testing.T) {
	r, parent, who := registry(t, "admin", "")
	_, token := issue(t, r, who, 0)
	child, err := r.Authenticate(token, now)
	if err != nil {
		t.Fatal(err)
	}
	// security: K19
	if err := r.Valid(child, parent.Expires); !errors.Is(err, ErrExpired) {
		t.Errorf("after the end of the parent: %v", err)
	}
	template, err := r.ConsoleKey(who, 0, now)
	if err != nil {
		t.Fatal(err)
	}
	parent.Revoked = now
	put(t, r, parent)
	// security: K19
	if _, err := r.Authenticate(token, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("the parent is revoked: %v", err)
	}
	// security: K19
	if err := r.Valid(child, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("the parent is revoked: %v", err)
	}
	if _, _, err := r.Issue(template, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("a code of a revoked key: %v", err)
	}
	alone := NewRegistry()
	k, _ := r.Find(child.Through, now)
	put(t, alone, k)
	if _, err := alone.Authenticate(token, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("without its parent: %v", err)
	}
}

func TestConsoleKeyOfAdmin(t *testing.T) {
	r, admin := NewRegistry(), "first"
	r.SetAdmin(func() string { return admin })
	k, token := issue(t, r, Admin, 0)
	if c, err := r.Authenticate(token, now.Add(ConsoleKeyLife-time.Second)); err != nil || c.Key != KeyAdmin || c.Name != Admin.Name || c.Scopes != AllScopes() {
		t.Errorf("%+v, %v", c, err)
	}
	// security: K19
	if _, err := r.Authenticate(token, now.Add(ConsoleKeyLife)); !errors.Is(err, ErrExpired) {
		t.Errorf("after 12 h: %v", err)
	}
	admin = "rotated"
	// security: K19
	if _, err := r.Authenticate(token, now); !errors.Is(err, ErrRevoked) {
		t.Errorf("after the rotation of the admin token: %v", err)
	}
	if err := r.EndedError(k, now); err != ErrRevoked {
		t.Errorf("in lists: %v", err)
	}
}

func TestConsoleKeysAreLimited(t *testing.T) {
	r, _, who := registry(t, "devices:read", "")
	first, _ := issue(t, r, who, 0)
	for range MaxConsoleKeys - 2 {
		issue(t, r, who, 0)
	}
	template, err := r.ConsoleKey(who, 0, now) // as of codes that were made before
	if err != nil {
		t.Fatal(err)
	}
	last, _, err := r.Issue(template, now)
	if err != nil {
		t.Fatal(err)
	}
	// security: K19
	if _, _, err := r.Issue(template, now); err == nil {
		t.Fatal("two codes are exchanged for one key that is left")
	}
	put(t, r, last)
	r.Issued(last)
	// security: K19
	if _, err := r.ConsoleKey(who, 0, now); err == nil {
		t.Fatal("no limit")
	}
	first.Revoked = now
	put(t, r, first)
	if _, err := r.ConsoleKey(who, 0, now); err != nil {
		t.Errorf("one was revoked: %v", err)
	}
}
