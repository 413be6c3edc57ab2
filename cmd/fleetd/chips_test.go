package main

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestChips(t *testing.T) {
	f := newAPI(t, map[string]string{
		"POST /v1/attestation/keys":           `{"imported":2}`,
		"GET /v1/attestation/keys?limit=1000": `{"items":[{"serial":"SN-1","device":"aa:bb:cc:dd:ee:01","imported_at":"2026-08-01T09:00:00Z","bound_at":null},{"serial":"SN-2","device":"","imported_at":"2026-08-01T09:00:00Z","bound_at":null}],"next_cursor":""}`,
		"DELETE /v1/attestation/keys/SN-1":    "",
	})
	key := strings.Repeat("0a", 32)
	file := filepath.Join(t.TempDir(), "keys.csv")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("Serial,Key,Device\n# a comment\nSN-1, " + key + ",aa:bb:cc:dd:ee:01\n\nSN-2," + key + "\n")
	f.run("chips", "import", file).is(t, exitOK, "2 chip keys imported\n", "")
	f.run("chips", "list").is(t, exitOK, "SERIAL  DEVICE             IMPORTED\nSN-1    aa:bb:cc:dd:ee:01  2026-08-01T09:00:00Z\nSN-2    -                  2026-08-01T09:00:00Z\n", "")
	f.run("chips", "remove", "SN-1", "--yes").is(t, exitOK, "SN-1 removed; a device that it proved stays a member\n", "")
	want := []string{`POST /v1/attestation/keys {"items":[{"serial":"SN-1","key":"` + key + `","device":"aa:bb:cc:dd:ee:01"},{"serial":"SN-2","key":"` + key + `"}]}`, "GET /v1/attestation/keys?limit=1000", "DELETE /v1/attestation/keys/SN-1"}
	if got := f.requests(); !reflect.DeepEqual(got, want) {
		t.Errorf("asked %q", got)
	}
	for text, want := range map[string]string{
		"":                                    "fleetd: the file has no chip keys; each line is serial,key[,device]\n",
		"SN-1," + key + "\nSN-2," + key + "0": "fleetd: line 2: the second field is not a chip key: 64 hex digits, the 32 bytes of eFuse block KEY0\n",
		"SN-1":                                "fleetd: line 1: it must be serial,key[,device], and has 1 field\n",
		"\"SN-1," + key:                       "fleetd: line 1 is not CSV: extraneous or missing \" in quoted-field\n",
	} {
		write(text)
		f.run("chips", "import", file).is(t, exitFailed, "", want)
	}
	if got := f.requests(); len(got) != 3 {
		t.Errorf("a file with a fault was sent: %q", got)
	}
}
