//go:build ignore

// Pack writes dist/NAME.mcpb, the bundle with which a host such as Claude Desktop installs `fleetd mcp`, and adds it to
// dist/server.json, the entry of the MCP registry:
//
//	go run pack.go NAME VERSION GOOS PROGRAM [URL]
//
// URL is the address of the directory from which releases are downloaded; without it, server.json is not written. The same input
// gives the same bytes.
package main

import (
	"archive/zip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 5 {
		log.Fatal("usage: go run pack.go NAME VERSION GOOS PROGRAM [URL]")
	}
	name, version, system, program := os.Args[1], strings.TrimPrefix(os.Args[2], "v"), os.Args[3], os.Args[4]
	manifest := read("deploy/mcpb/manifest.json")
	manifest["version"] = version
	platform := map[string]string{"windows": "win32"}[system]
	if platform == "" {
		platform = system
	}
	manifest["compatibility"] = map[string]any{"platforms": []string{platform}}
	bundle := filepath.Join("dist", name+".mcpb")
	must(write(bundle, manifest, program))
	if len(os.Args) < 6 || os.Args[5] == "" {
		return
	}
	content, err := os.ReadFile(bundle)
	must(err)
	path := "dist/server.json"
	if _, err := os.Stat(path); err != nil {
		path = "deploy/mcpb/server.json"
	}
	entry := read(path)
	entry["version"] = version
	packages, _ := entry["packages"].([]any)
	entry["packages"] = append(packages, map[string]any{"registryType": "mcpb", "identifier": strings.TrimSuffix(os.Args[5], "/") + "/" + name + ".mcpb",
		"fileSha256": fmt.Sprintf("%x", sha256.Sum256(content)), "transport": map[string]any{"type": "stdio"}})
	must(os.WriteFile("dist/server.json", encode(entry), 0o644))
}

func write(bundle string, manifest map[string]any, program string) error {
	file, err := os.Create(bundle)
	if err != nil {
		return err
	}
	binary, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	z := zip.NewWriter(file)
	for _, f := range []struct {
		name    string
		mode    os.FileMode
		content []byte
	}{{"manifest.json", 0o644, encode(manifest)}, {"server/" + filepath.Base(program), 0o755, binary}} {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate}
		header.SetMode(f.mode)
		w, err := z.CreateHeader(header)
		if err != nil {
			return err
		}
		if _, err := w.Write(f.content); err != nil {
			return err
		}
	}
	if err := z.Close(); err != nil {
		return err
	}
	return file.Close()
}

func read(path string) (v map[string]any) {
	text, err := os.ReadFile(path)
	must(err)
	must(json.Unmarshal(text, &v))
	return v
}

func encode(v any) []byte {
	text, err := json.MarshalIndent(v, "", "  ")
	must(err)
	return append(text, '\n')
}

func must(err error) {
	if err != nil {
		log.Fatal("pack: ", err)
	}
}
