//go:build ignore

// Zip writes a bundle (.mcpb), with which a host installs `fleetd mcp`. The same input gives the same bytes.
//
//	go run zip.go BUNDLE MANIFEST PROGRAM
package main

import (
	"archive/zip"
	"log"
	"os"
	"path/filepath"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 4 {
		log.Fatal("usage: go run zip.go BUNDLE MANIFEST PROGRAM")
	}
	file, err := os.Create(os.Args[1])
	must(err)
	z := zip.NewWriter(file)
	add(z, "manifest.json", 0o644, os.Args[2])
	add(z, "server/"+filepath.Base(os.Args[3]), 0o755, os.Args[3])
	must(z.Close())
	must(file.Close())
}

func add(z *zip.Writer, name string, mode os.FileMode, path string) {
	content, err := os.ReadFile(path)
	must(err)
	header := &zip.FileHeader{Name: name, Method: zip.Deflate}
	header.SetMode(mode)
	w, err := z.CreateHeader(header)
	must(err)
	_, err = w.Write(content)
	must(err)
}

func must(err error) {
	if err != nil {
		log.Fatal("zip: ", err)
	}
}
