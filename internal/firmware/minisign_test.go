package firmware

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/blake2b"
)

// signer is a key of minisign, with its line of a file.
type signer struct {
	key    ed25519.PrivateKey
	id     keyID
	public string
}

func newSigner(seed byte) signer {
	key := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	s := signer{key: key, id: keyID{seed, 1, 2}}
	s.public = base64.StdEncoding.EncodeToString(append(append([]byte("Ed"), s.id[:]...), key.Public().(ed25519.PublicKey)...))
	return s
}

func (s signer) sign(content []byte, algorithm string) string {
	if algorithm == "ED" {
		sum := blake2b.Sum512(content)
		content = sum[:]
	}
	return base64.StdEncoding.EncodeToString(append(append([]byte(algorithm), s.id[:]...), ed25519.Sign(s.key, content)...))
}

func writeKeys(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSignatures(t *testing.T) {
	mine, other, stranger := newSigner(1), newSigner(2), newSigner(3)
	keys, err := ReadKeys(writeKeys(t, "untrusted comment: minisign public key 1\n"+mine.public+"\n\n# the build server\n"+other.public+"\n"))
	if err != nil || len(keys) != 2 {
		t.Fatal(keys, err)
	}
	file := []byte("the content of a file")
	stolen := stranger
	stolen.id = mine.id
	for name, c := range map[string]struct {
		signature string
		want      any
	}{
		"prehashed":                  {mine.sign(file, "ED"), nil},
		"legacy":                     {other.sign(file, "Ed"), nil},
		"none":                       {"", faultNotSigned},
		"of another file":            {mine.sign([]byte("another"), "ED"), faultWrong},
		"by a stranger":              {stranger.sign(file, "ED"), faultKey},
		"by a stranger with our id":  {stolen.sign(file, "ED"), faultWrong},
		"the other format":           {"RW" + mine.sign(file, "ED")[2:], faultWrong},
		"no base64":                  {"untrusted comment: x", faultSignature},
		"too short":                  {mine.sign(file, "ED")[:96], faultSignature},
		"of an unknown algorithm":    {mine.sign(file, "XX"), faultSignature},
		"with a line end behind it ": {mine.sign(file, "ED") + "\n", nil},
	} {
		fault, err := keys.verify(bytes.NewReader(file), int64(len(file)), c.signature)
		// security: D23
		if err != nil || (fault == nil) != (c.want == nil) || fault != nil && fault != c.want {
			t.Errorf("%s: %v, error %v", name, fault, err)
		}
	}
	for _, text := range []string{"", "untrusted comment: nothing\n", mine.sign(file, "Ed"), mine.public[:20], "RU" + mine.public[2:]} {
		if _, err := ReadKeys(writeKeys(t, text)); err == nil || !strings.Contains(err.Error(), "minisign") {
			t.Errorf("%q: error %v", text, err)
		}
	}
}

// TestMinisignVector verifies what the program itself has written: the test vector of its documentation.
func TestMinisignVector(t *testing.T) {
	keys, err := ReadKeys(writeKeys(t, "untrusted comment: minisign public key E7620F1842B4E81F\nRWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3\n"))
	if err != nil {
		t.Fatal(err)
	}
	const signature = "RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA="
	if fault, err := keys.verify(strings.NewReader("test"), 4, signature); err != nil || fault != nil {
		t.Errorf("%v, error %v", fault, err)
	}
	if fault, _ := keys.verify(strings.NewReader("Test"), 4, signature); fault != faultWrong {
		t.Errorf("%v", fault)
	}
}
