package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// imageOptions say which firmware files to write in place of running devices.
type imageOptions struct {
	dir, version, ota string
	size              int
}

func (o *imageOptions) flags(fs *flag.FlagSet) {
	fs.StringVar(&o.dir, "images", "", "write an application image and the zip of a release for each profile into `DIR`, and end")
	fs.StringVar(&o.version, "image-version", "", "`version` of these images; empty: that of the profile")
	fs.IntVar(&o.size, "image-size", 0, "`bytes` that these images have at least")
	fs.StringVar(&o.ota, "image-ota", "", "OTA `URL` built into these images; empty: that of --ota")
}

// writeImages writes the files and prints their names.
func writeImages(o *options, stdout io.Writer) error {
	if err := os.MkdirAll(o.images.dir, 0o755); err != nil {
		return fmt.Errorf("--images: %w", err)
	}
	for _, p := range o.Profiles {
		p.ImageSize = o.images.size
		version, ota := cmp.Or(o.images.version, p.Version()), cmp.Or(o.images.ota, o.OTA)
		name, release, err := p.Release(version, ota)
		if err != nil {
			return fmt.Errorf("--images: %w", err)
		}
		for _, file := range []struct {
			name    string
			content []byte
		}{{p.Board() + "-" + version + ".bin", p.Image(version, ota)}, {name, release}} {
			path := filepath.Join(o.images.dir, file.name)
			if err := os.WriteFile(path, file.content, 0o644); err != nil {
				return fmt.Errorf("--images: %w", err)
			}
			fmt.Fprintln(stdout, path)
		}
	}
	return nil
}
