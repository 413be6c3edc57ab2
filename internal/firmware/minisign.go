package firmware

import (
	"bufio"
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/crypto/blake2b"

	"fleetd/internal/espimage"
)

// Keys are the public keys of minisign with one of which an upload must be signed. None: no signature is needed.
type Keys map[keyID]ed25519.PublicKey

type keyID [8]byte

// Algorithms of minisign: over the file itself, and over its BLAKE2b-512 (the default since version 0.10).
var (
	legacy    = []byte("Ed")
	prehashed = []byte("ED")
)

// Sizes of what minisign encodes: the algorithm, the key's id, and the key or the signature.
const (
	publicSize    = 2 + len(keyID{}) + ed25519.PublicKeySize
	signatureSize = 2 + len(keyID{}) + ed25519.SignatureSize
)

// commentMark begins the first line of minisign's files; # begins a comment of people.
const commentMark = "untrusted comment:"

// ReadKeys reads a file with keys, one or several files of minisign one after the other, or only their second lines.
func ReadKeys(path string) (Keys, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	keys := Keys{}
	lines := bufio.NewScanner(bytes.NewReader(content))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, commentMark) || strings.HasPrefix(line, "#") {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(line)
		if err != nil || len(key) != publicSize || !bytes.HasPrefix(key, legacy) {
			return nil, fmt.Errorf("line %d of %s is no public key of minisign, which begins with RW", n, path)
		}
		keys[keyID(key[2:])] = ed25519.PublicKey(key[2+len(keyID{}):])
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("%s has no public key of minisign", path)
	}
	return keys, lines.Err()
}

// Faults of signatures.
var (
	faultNotSigned = &espimage.Fault{Code: "signature_missing", Text: "Uploads to this fleet must be signed with minisign. Sign the file, and give the second line of FILE.minisig."}
	faultSignature = &espimage.Fault{Code: "signature", Text: "The signature is none of minisign: give the second line of FILE.minisig, which begins with RU or RW."}
	faultKey       = &espimage.Fault{Code: "signature_key", Text: "The file is signed with a key that is not in --firmware-keys. Sign it with one that is, or add the public key there on all nodes."}
	faultWrong     = &espimage.Fault{Code: "signature", Text: "The signature is not of this file. Sign the file as it is."}
)

// verify checks the signature of a file of this size. The older of the two formats is of the file itself, which is then in
// memory: callers run one at a time.
func (k Keys) verify(file io.ReaderAt, size int64, signature string) (fault *espimage.Fault, err error) {
	if signature == "" {
		return faultNotSigned, nil
	}
	raw, decodeErr := base64.StdEncoding.DecodeString(strings.TrimSpace(signature))
	if decodeErr != nil || len(raw) != signatureSize {
		return faultSignature, nil
	}
	content := io.NewSectionReader(file, 0, size)
	var signed []byte
	switch algorithm := raw[:2]; {
	case bytes.Equal(algorithm, prehashed):
		sum, _ := blake2b.New512(nil) // fails for a key that is too long alone
		if _, err = io.Copy(sum, content); err == nil {
			signed = sum.Sum(nil)
		}
	case bytes.Equal(algorithm, legacy):
		signed = make([]byte, size)
		_, err = io.ReadFull(content, signed)
	default:
		return faultSignature, nil
	}
	key := k[keyID(raw[2:])]
	switch {
	case err != nil:
		return nil, err
	case key == nil:
		return faultKey, nil
	case !ed25519.Verify(key, signed, raw[2+len(keyID{}):]):
		return faultWrong, nil
	}
	return nil, nil
}
