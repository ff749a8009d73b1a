// Command render-chart prints the objects of a Helm chart, as `helm template` does: CHART VALUES NAMESPACE.
package main

import (
	"fmt"
	"os"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: render-chart CHART VALUES NAMESPACE")
		os.Exit(2)
	}
	if err := render(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(directory, file, namespace string) error {
	chart, err := loader.Load(directory)
	if err != nil {
		return err
	}
	values, err := chartutil.ReadValuesFile(file)
	if err != nil {
		return err
	}
	release := chartutil.ReleaseOptions{Name: "atoll", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(files))
	for name := range files {
		if strings.HasSuffix(name, ".yaml") {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Printf("---\n# %s\n%s\n", name, files[name])
	}
	return nil
}
