package credential_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/credential"
)

func mints(t *testing.T) (a, b *credential.Mint) {
	t.Helper()
	var err error
	for _, m := range []**credential.Mint{&a, &b} {
		if *m, err = credential.New([]byte("a secret for tests only")); err != nil {
			t.Fatal(err)
		}
	}
	return a, b
}

// Two nodes, of which one learns of a rotation later: what each signs, the other
// takes, and after the grace nothing of the old secret is worth anything.
func TestRotation(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := mints(t)
		const device, client = "aa:bb:cc:dd:ee:ff", "c"
		now := time.Now()
		oldToken, oldAdmin, oldSealed := a.DeviceToken(device, client, 4), a.AdminToken(), a.Seal("p", "n", []byte("chip"))
		oldApplication := a.ClientID("{}", now)
		oldUpload := a.UploadToken(device, now.Add(240*time.Hour))
		until := now.Add(time.Hour)
		rotation := credential.Rotation{PreviousUntil: until, Secrets: []credential.SealedSecret{{Number: 1, Since: 5, Sealed: a.NewSecret(1)}}}
		if err := a.Adopt(rotation, now); err != nil {
			t.Fatal(err)
		}
		// b has not learned of it.
		if sign := a.HopSignature(device, "call", ""); !b.IsHop(sign, device, "call", "") {
			t.Error("a node that has not learned of the rotation refuses the others")
		}
		time.Sleep(credential.SwitchDelay / 2)
		if err := b.Adopt(rotation, time.Now()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(credential.SwitchDelay/2 + time.Second)
		// a signs with the new one, b still with the old one.
		if signA, signB := a.HopSignature(device, "call", ""), b.HopSignature(device, "call", ""); signA == signB || !b.IsHop(signA, device, "call", "") || !a.IsHop(signB, device, "call", "") {
			t.Error("nodes refuse each other while they switch")
		}
		time.Sleep(credential.SwitchDelay)
		if a.HopSignature(device, "call", "") != b.HopSignature(device, "call", "") {
			t.Error("one node does not switch")
		}
		for name, m := range map[string]*credential.Mint{"a": a, "b": b} {
			// security: K18
			if m.IsAdmin(oldAdmin) || !m.IsAdmin(a.AdminToken()) {
				t.Errorf("%s: the old admin token lives", name)
			}
			if !m.IsDevice(oldToken, device, client, 4) || m.IsDevice(oldToken, device, client, 5) || m.DeviceToken(device, client, 4) != oldToken {
				t.Errorf("%s: tokens of generation 4 are those of the old secret", name)
			}
			if fresh := a.DeviceToken(device, client, 5); !m.IsDevice(fresh, device, client, 5) {
				t.Errorf("%s: tokens of generation 5 are those of the new one", name)
			}
			if err := m.VerifyUpload(oldUpload, device, time.Now()); err != nil {
				t.Errorf("%s: within the grace: %v", name, err)
			}
			if plain, err := m.Open("p", "n", oldSealed); err != nil || string(plain) != "chip" {
				t.Errorf("%s: what was sealed before: %v", name, err)
			}
			again, changed, err := m.Reseal("p", "n", oldSealed)
			if err != nil || !changed || !strings.HasPrefix(again, "1:") {
				t.Fatalf("%s: %q, %v", name, again, err)
			}
			if _, changed, err := m.Reseal("p", "n", again); changed || err != nil {
				t.Errorf("%s: sealed twice, %v", name, err)
			}
			if plain, err := b.Open("p", "n", again); err != nil || string(plain) != "chip" {
				t.Errorf("%s: sealed anew: %v", name, err)
			}
		}
		// The old secret alone is useless after the grace period.
		thief, _ := mints(t)
		forged, upload := thief.HopSignature(device, "call", ""), thief.UploadToken(device, now.Add(240*time.Hour))
		time.Sleep(time.Until(until))
		// security: K18
		if a.IsHop(forged, device, "call", "") || a.VerifyUpload(upload, device, time.Now()) == nil || a.IsDevice(thief.DeviceToken(device, client, 5), device, client, 5) || a.IsAdmin(thief.AdminToken()) {
			t.Error("the old secret is still worth something")
		}
		if again, _, err := a.Reseal("p", "n", oldSealed); err != nil {
			t.Errorf("the grace is over, and what was not sealed anew is lost: %v", err)
		} else if _, err := thief.Open("p", "n", again); err == nil {
			t.Error("what was sealed anew opens with the old secret")
		}
		// A registered application has its client_id for as long as it has a grant, however often the secret is replaced.
		rotation.Secrets = append(rotation.Secrets, credential.SealedSecret{Number: 2, Since: 6, Sealed: a.NewSecret(2)})
		if err := a.Adopt(rotation, time.Now()); err != nil {
			t.Fatal(err)
		}
		if text, err := a.OpenClientID(oldApplication); err != nil || text != "{}" {
			t.Errorf("the client_id of a registered application: %q, %v", text, err)
		}
		if _, err := a.OpenClientID(a.Cursor("client", "{}", time.Now())); err == nil {
			t.Error("a cursor opens as a client_id")
		}
	})
}

// The admin token alone.
func TestAdminRotation(t *testing.T) {
	t.Parallel()
	a, b := mints(t)
	first := a.AdminToken()
	if err := a.Adopt(credential.Rotation{}, time.Time{}); err != nil || !a.IsAdmin(first) {
		t.Errorf("nothing was rotated: %v", err)
	}
	seen := map[string]bool{first: true}
	for number := range int64(3) {
		if err := a.Adopt(credential.Rotation{Admin: number + 1}, time.Time{}); err != nil {
			t.Fatal(err)
		}
		// security: K18
		if token := a.AdminToken(); seen[token] || len(token) != 64 || a.IsAdmin(first) {
			t.Errorf("number %d is %s", number+1, token)
		}
		seen[a.AdminToken()] = true
	}
	if a.DeviceToken("d", "c", 1) != b.DeviceToken("d", "c", 1) || a.HopSignature("d", "k", "") != b.HopSignature("d", "k", "") {
		t.Error("more than the admin token changed")
	}
}

// A secret that was sealed under another one than that of the settings changes nothing.
func TestAdoptRefuses(t *testing.T) {
	t.Parallel()
	a, _ := mints(t)
	other, err := credential.New([]byte("another secret for tests"))
	if err != nil {
		t.Fatal(err)
	}
	before := a.AdminToken()
	for name, sealed := range map[string]string{"another fleet's": other.NewSecret(1), "of another number": a.NewSecret(2), "nothing": ""} {
		if err := a.Adopt(credential.Rotation{Secrets: []credential.SealedSecret{{Number: 1, Since: 1, Sealed: sealed}}}, time.Time{}); err == nil || a.AdminToken() != before || a.Number() != 0 {
			t.Errorf("%s was adopted: %v", name, err)
		}
	}
}
