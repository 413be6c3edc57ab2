package credential

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

func mint(t *testing.T, secret string) *Mint {
	t.Helper()
	m, err := New([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const secret = "a secret of the test fleet"

func TestAdminTokenIsPlainHMAC(t *testing.T) {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte("admin"))
	m := mint(t, secret)
	if want := hex.EncodeToString(h.Sum(nil)); m.AdminToken() != want || !m.IsAdmin(want) {
		t.Errorf("admin token %s, want %s", m.AdminToken(), want)
	}
	if m.IsAdmin("") || m.IsAdmin(mint(t, secret+"x").AdminToken()) {
		t.Error("another token passes as admin")
	}
}

func TestDeviceTokenBindsEveryField(t *testing.T) {
	m := mint(t, secret)
	token := m.DeviceToken("aa:bb:cc:dd:ee:ff", "client", 0)
	if !m.IsDevice(token, "aa:bb:cc:dd:ee:ff", "client", 0) {
		t.Fatal("own token refused")
	}
	if len(token) != 43 {
		t.Errorf("token has %d characters, want 43", len(token))
	}
	for _, c := range []struct {
		device, client string
		generation     int64
	}{{"aa:bb:cc:dd:ee:fe", "client", 0}, {"aa:bb:cc:dd:ee:ff", "clienT", 0}, {"aa:bb:cc:dd:ee:ff", "client", 1}, {"aa:bb:cc:dd:ee:ffc", "lient", 0}} {
		// security: D1
		if m.IsDevice(token, c.device, c.client, c.generation) {
			t.Errorf("token passes for %+v", c)
		}
	}
	// security: D1
	if mint(t, secret+"2").IsDevice(token, "aa:bb:cc:dd:ee:ff", "client", 0) {
		t.Error("token passes in another fleet")
	}
}

func TestCode(t *testing.T) {
	m, now := mint(t, secret), time.Unix(1_800_000_000, 0)
	code := m.Code("console", now.Add(time.Minute))
	if err := m.VerifyCode("console", code, now.Add(59*time.Second)); err != nil || code == m.Code("console", now.Add(time.Minute)) {
		t.Errorf("%q: %v", code, err)
	}
	if err := m.VerifyCode("console", code, now.Add(time.Minute)); !errors.Is(err, ErrExpired) {
		t.Errorf("expired: %v", err)
	}
	for _, bad := range []string{"", ".", code[1:], "x" + code, code + "A", strings.Replace(code, ".", "", 1), m.UploadToken("", now.Add(time.Minute)), m.Code("consent", now.Add(time.Minute))} {
		// security: K19
		if err := m.VerifyCode("console", bad, now); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestExpiringTokens(t *testing.T) {
	m := mint(t, secret)
	now := time.Unix(1_800_000_000, 0)
	upload := m.UploadToken("d", now.Add(time.Hour))
	snapshot := m.SnapshotToken("aa:bb:cc:dd:ee:ff", "photo-1", now.Add(time.Hour))
	if err := m.VerifyUpload(upload, "d", now); err != nil {
		t.Error(err)
	}
	// security: D9
	if err := m.VerifyUpload(upload, "e", now); !errors.Is(err, ErrInvalid) {
		t.Errorf("another device: %v", err)
	}
	// security: D9
	if err := m.VerifyUpload(upload, "d", now.Add(time.Hour)); !errors.Is(err, ErrExpired) {
		t.Errorf("expired: %v", err)
	}
	device, photo, err := m.VerifySnapshot(snapshot, now)
	if err != nil || device != "aa:bb:cc:dd:ee:ff" || photo != "photo-1" {
		t.Errorf("snapshot: %s %s %v", device, photo, err)
	}
	if err := m.VerifyUpload(upload+"AAAA", "d", now); !errors.Is(err, ErrInvalid) {
		t.Errorf("something after the token: %v", err)
	}
	for _, bad := range []string{"", ".", "a.b", upload, snapshot[:len(snapshot)-1], "!" + snapshot} {
		// security: D9
		if _, _, err := m.VerifySnapshot(bad, now); !errors.Is(err, ErrInvalid) {
			t.Errorf("snapshot %q: %v", bad, err)
		}
		if bad != upload {
			// security: D9
			if err := m.VerifyUpload(bad, "d", now); !errors.Is(err, ErrInvalid) {
				t.Errorf("upload %q: %v", bad, err)
			}
		}
	}
}

func TestShortSecretRefused(t *testing.T) {
	if _, err := New([]byte("short")); !errors.Is(err, ErrSecretShort) {
		t.Error(err)
	}
	if _, err := New(make([]byte, MinSecret-1)); !errors.Is(err, ErrSecretShort) {
		t.Error(err)
	}
	if _, err := New(make([]byte, MinSecret)); err != nil {
		t.Error(err)
	}
	if s := NewSecret(); len(s) != 64 || s == NewSecret() {
		t.Errorf("bad new secret %q", s)
	}
}

// FuzzVerify changes valid tokens: a changed token that is still valid must have the signed
// content, and none may be valid for another device, purpose or time.
func FuzzVerify(f *testing.F) {
	m, err := New([]byte(secret))
	if err != nil {
		f.Fatal(err)
	}
	now := time.Unix(1_800_000_000, 0)
	const device = "aa:bb:cc:dd:ee:ff"
	snapshot, old := m.SnapshotToken(device, "p1", now.Add(time.Hour)), m.SnapshotToken(device, "p0", now)
	upload, token := m.UploadToken(device, now.Add(time.Hour)), m.DeviceToken(device, "c", 0)
	for _, seed := range []string{"AAAA.BBBB", snapshot, old, upload, m.UploadToken(device, now), token, m.AdminToken(), ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, given string) {
		if d, photo, err := m.VerifySnapshot(given, now); err == nil && (d != device || photo != "p1") {
			t.Errorf("%q passes for the photo %q of %q", given, photo, d)
		}
		plain := strings.NewReplacer("\r", "", "\n", "").Replace(given) // encoding/base64 passes over line ends
		if m.VerifyUpload(given, device, now) == nil && plain != upload {
			t.Errorf("%q passes for an upload", given)
		}
		if m.IsDevice(given, device, "c", 0) != (given == token) || m.IsAdmin(given) != (given == m.AdminToken()) {
			t.Errorf("%q passes, or the right one does not", given)
		}
		for _, other := range []bool{m.VerifyUpload(given, "d", now) == nil, m.VerifyUpload(given, device, now.Add(2*time.Hour)) == nil, m.IsDevice(given, "d", "c", 0),
			m.IsDevice(given, device, "d", 0), m.IsDevice(given, device, "c", 1)} {
			if other {
				t.Errorf("%q passes for what it was not made for", given)
			}
		}
	})
}

// What is sealed opens only with the same secret, purpose and name, and never
// looks the same twice.
func TestSeal(t *testing.T) {
	m, other := mint(t, secret), mint(t, secret+"x")
	sealed := m.Seal("keys", "SN-1", []byte("plain text"))
	if plain, err := m.Open("keys", "SN-1", sealed); err != nil || string(plain) != "plain text" {
		t.Errorf("%q, %v", plain, err)
	}
	// security: D6
	if again := m.Seal("keys", "SN-1", []byte("plain text")); again == sealed || strings.Contains(sealed, "plain") {
		t.Error("the same text twice, or in clear")
	}
	for name, open := range map[string]func() ([]byte, error){
		"another secret":  func() ([]byte, error) { return other.Open("keys", "SN-1", sealed) },
		"another purpose": func() ([]byte, error) { return m.Open("tokens", "SN-1", sealed) },
		"another name":    func() ([]byte, error) { return m.Open("keys", "SN-2", sealed) },
		"changed":         func() ([]byte, error) { return m.Open("keys", "SN-1", "A"+sealed[1:]+"AA") },
		"cut":             func() ([]byte, error) { return m.Open("keys", "SN-1", sealed[:10]) },
		"empty":           func() ([]byte, error) { return m.Open("keys", "SN-1", "") },
		"no base64":       func() ([]byte, error) { return m.Open("keys", "SN-1", "!") },
	} {
		// security: D6
		if plain, err := open(); !errors.Is(err, ErrInvalid) || plain != nil {
			t.Errorf("%s: %q, %v", name, plain, err)
		}
	}
}
